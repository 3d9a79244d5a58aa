"""The command `cokernel aot`: how a function and its types are named, and what it prints."""

import json

import pytest

from cokernel import cli
from cokernel.aot import command

LOOKUP = ["examples/embedding_lookup.py:lookup", "float32[1000,128]", "int32[8192]"]


def test_a_function_that_is_accepted_is_reported(compiler_for, capsys):
    compiler_for("v6e")
    assert cli.main(["aot", *LOOKUP, "--target", "v6e"]) == 0
    out = capsys.readouterr().out
    assert "look_up for v6e: accepted" in out
    assert "VMEM of a vector subcore" in out


def test_the_report_is_json_too_for_every_target(compiler_for, capsys):
    compiler_for("v6e")
    assert command.main([*LOOKUP, "--target", "v6e", "--target", "tpu7x", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [(found["target"], found["accepted"]) for found in reports] == [
        ("v6e", True),
        ("tpu7x", True),
    ]
    [use] = [use for use in reports[0]["memory"] if use["memory"] == "VMEM of a vector subcore"]
    assert use["asked"] == 4 * (256 + 2 * 64 * 128)
    [call] = reports[0]["calls"]
    assert call["unit"] == "SparseCore"


def test_a_function_that_is_refused_is_reported_with_its_line(capsys):
    # It is refused before there is any need of a compiler.
    assert command.main(["examples/ping_pong.py:play", "int32[1]", "--target", "v6e"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "play for v6e: refused program play at examples/ping_pong.py:20" in out
    assert "a CoreMesh is made of CPU cores" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["play"], "name a function as module:function, got 'play'"),
        (["nowhere:play"], "cannot load 'nowhere:play': ModuleNotFoundError"),
        (["examples/ping_pong.py:nothing"], "cannot load 'examples/ping_pong.py:nothing'"),
        (["json:loads.nothing"], "cannot load 'json:loads.nothing': AttributeError"),
        (["json:loads", "float32"], "a type is written like 'float32[256,128]', got 'float32'"),
        (["json:loads", "float33[2]"], "there is no type of elements 'float33'"),
    ],
)
def test_what_cannot_be_understood_is_said(arguments, message, capsys):
    assert command.main([*arguments, "--target", "v6e"]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_compiler_is_said(tmp_path, monkeypatch, capsys):
    stand_in = tmp_path / "python"
    stand_in.write_text("""#!/bin/sh\necho '{"missing": "has no module libtpu"}'\n""")
    stand_in.chmod(0o755)
    monkeypatch.setenv("COKERNEL_AOT_PYTHON", str(stand_in))
    assert command.main([*LOOKUP, "--target", "v6e"]) == 2
    assert "pip install 'cokernel[tpu]'" in capsys.readouterr().err
