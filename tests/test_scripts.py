"""The scripts behind the Makefile: what they find, and what they say when something is missing."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"


@pytest.fixture
def bare_path(tmp_path):
    """A folder for PATH that holds the shell tools of the scripts, no Python and no compiler."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "env", "ls", "mktemp", "rm"):
        for folder in os.defpath.split(os.pathsep) + os.environ["PATH"].split(os.pathsep):
            if (pathlib.Path(folder) / name).exists():
                (tools / name).symlink_to(pathlib.Path(folder) / name)
                break
    return tools


def _run(script, path, **variables):
    environment = {"PATH": str(path), "HOME": str(path), **variables}
    return subprocess.run(
        [SCRIPTS / script], env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_missing_python_is_named(bare_path):
    done = _run("find_python.sh", bare_path)
    assert done.returncode == 1
    assert "needs Python 3.12 or newer" in done.stderr


def test_a_python_that_refuses_to_run_is_passed_over(bare_path):
    (bare_path / "python3.13").write_text("#!/bin/sh\nexit 127\n")
    (bare_path / "python3.13").chmod(0o755)
    (bare_path / "python3").symlink_to(sys.executable)
    done = _run("find_python.sh", bare_path)
    assert done.returncode == 0, done.stderr
    # A virtual environment is told by the file beside the link, so the link itself may be printed.
    assert pathlib.Path(done.stdout.strip()).resolve() == pathlib.Path(sys.executable).resolve()


def test_a_python_named_by_the_user_is_preferred(bare_path):
    done = _run("find_python.sh", bare_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == sys.executable


def test_a_missing_compiler_is_named(bare_path):
    done = _run("check_compiler.sh", bare_path, CXX="no-such-compiler")
    assert done.returncode == 1
    assert "needs a C++17 compiler" in done.stderr
    assert "no-such-compiler" in done.stderr
