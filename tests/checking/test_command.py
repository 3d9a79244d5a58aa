"""`cokernel check` with scripts that do not run, or do not end well."""

import json
import subprocess
import sys

import pytest

from cokernel.checking import command

SCRIPT = """
import sys
import jax, jax.numpy as jnp
import cokernel

def body(out_ref):
    out_ref[...] = jnp.ones(8)

kernel = cokernel.kernel(
    body, jax.ShapeDtypeStruct((8,), jnp.float32), mesh=cokernel.CoreMesh(core=1)
)
kernel().block_until_ready()
"""


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.py", None, "there is no file"),
        ("notes.txt", b"These are notes, and no program.", "no Python script"),
        ("half.py", b"def f(:\n    pass\n", "at line 1"),
        ("image.png", b"\x89PNG\r\n\x1a\n\x00\x00", "no Python script"),
    ],
)
def test_a_file_that_is_no_script_is_a_usage_error(tmp_path, capsys, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as exit_:
        command.main([str(path)])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedules", "0"], "schedules"),
        (["--seed", str(2**64)], "seed"),
        (["--replay", "garbage"], "Replay:"),
        (["--replay", "ck1:random:0:3", "--schedules", "7"], "leave out --seed and --schedules"),
        (["--options", "races"], "name=value"),
        (["--options", "seed=3", "--seed", "4"], "contradict"),
        (["--target", "v99"], "v99"),
        (["--json", "/no/such/folder/report.json"], "no folder"),
        (["/"], "is a folder"),
    ],
)
def test_an_option_that_means_nothing_is_a_usage_error(tmp_path, capsys, arguments, words):
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(SystemExit) as exit_:
        command.main([*arguments, str(script)])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3)", 1, "ended itself with 3"),
        ("sys.exit('no input')", 1, "ended itself with 'no input'"),
        ("raise KeyError('x')", 1, "the script raised KeyError"),
    ],
)
def test_how_a_script_ended_is_told_beside_its_reports(tmp_path, ending, status, words):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + ending + "\n")
    run = [sys.executable, "-m", "cokernel", "check", script]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == status, ran.stderr
    assert "nothing found" in ran.stdout
    assert words in ran.stderr
    assert "runpy" not in ran.stderr


def test_with_the_report_on_stdout_what_the_script_prints_goes_to_stderr(tmp_path):
    script = tmp_path / "prints.py"
    prints = 'import os; print("printed"); os.system("echo echoed")\n'
    script.write_text(prints + SCRIPT + 'print("done")\n')
    command_line = [sys.executable, "-m", "cokernel", "check", "--json", "-", str(script)]
    ran = subprocess.run(command_line, capture_output=True, text=True, timeout=120, check=True)
    [report] = json.loads(ran.stdout)
    assert report["is_clean"]
    assert {"printed", "echoed", "done"} <= set(ran.stderr.split())
