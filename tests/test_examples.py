"""Every example runs, as a newcomer would run it, and prints what it says it does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPECTED = {
    "gpu/matmul.py": "and there was no race",
    "gpu/pipeline.py": "and there was no race",
    "embedding_lookup.py": "8192 rows are where they should be",
    "hello.py": "[2. 4. 6.]",
    "look_up_and_multiply.py": "512 rows are looked up and multiplied",
    "ping_pong.py": "2000 hits",
    "ring.py": "]",
}


def test_every_example_is_run_here():
    here = {path.name for path in EXAMPLES.glob("*.py")}
    gpu = {f"gpu/{path.name}" for path in (EXAMPLES / "gpu").glob("*.py")}
    assert here | gpu == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_example_runs_and_is_short(name):
    path = EXAMPLES / name
    run = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout
    assert EXPECTED[name] in run.stdout
    assert len(path.read_text().splitlines()) <= 90
