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
        (["json:loads", "str[2]"], "there is no type of elements 'str' in JAX"),
        (["json:loads", "float32[1 2]"], "a type is written like 'float32[256,128]'"),
        (["json:loads", "float64[2]"], "JAX makes float32 of float64: set JAX_ENABLE_X64=1"),
        (["json:__name__"], "'json:__name__' is 'json': name a function of arrays"),
        (["json:loads"], "takes (s, *, cls=None"),
    ],
)
def test_what_cannot_be_understood_is_said(arguments, message, capsys):
    assert command.main([*arguments, "--target", "v6e"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("import jax\n1 / 0\n", ":2: ZeroDivisionError: division by zero"),
        ("import sys\n\nsys.exit(3)\n", ":3: SystemExit: 3"),
        ("def f(:\n", ":1: SyntaxError: "),
        ("import nothing_of_this_name\n", ":1: ModuleNotFoundError: No module named"),
    ],
)
def test_a_module_that_fails_is_said_with_its_line(text, at, tmp_path, capsys):
    path = tmp_path / "module.py"
    path.write_text(text)
    assert command.main([f"{path}:f", "--target", "v6e"]) == 2
    assert f"cannot load '{path}:f' at {path}{at}" in capsys.readouterr().err


def test_too_few_types_are_said_with_the_functions_line(tmp_path, capsys):
    path = tmp_path / "module.py"
    path.write_text("\n\ndef add(x, y):\n    return x + y\n")
    assert command.main([f"{path}:add", "float32[2]", "--target", "h100"]) == 2
    error = capsys.readouterr().err
    assert f"'{path}:add' at {path}:3 takes (x, y), but the command line has 1 types" in error
    assert "missing a required argument: 'y'" in error


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_limit_is_a_number_of_seconds(limit, capsys):
    with pytest.raises(SystemExit) as end:
        command.main([*LOOKUP, "--target", "v6e", f"--time-limit={limit}"])
    assert end.value.code == 2
    assert "--time-limit" in capsys.readouterr().err


NEIGHBOUR = """
from jax.experimental.pallas import tpu_sc as plsc

mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
"""
MODULE = """
import jax
import jax.numpy as jnp
import cokernel
from neighbour_of_the_module import mesh

print("what the module prints")


def body(o_ref):
    # Only now is a second neighbour imported.
    from second_neighbour import reason

    raise ValueError(f"{reason} {mesh.num_cores} cores")


kernel = cokernel.kernel(body, jax.ShapeDtypeStruct((8,), jnp.float32), mesh=mesh)
"""


@pytest.mark.parametrize("form", ["{folder}/the_module.py", "the_module"])
def test_a_module_is_imported_for_each_chip_with_its_neighbours(
    form, tmp_path, monkeypatch, capsys
):
    (tmp_path / "neighbour_of_the_module.py").write_text(NEIGHBOUR)
    (tmp_path / "second_neighbour.py").write_text("reason = 'there are'\n")
    (tmp_path / "the_module.py").write_text(MODULE)
    if form == "the_module":
        monkeypatch.chdir(tmp_path)
    name = f"{form.format(folder=tmp_path)}:kernel"
    assert command.main([name, "--target", "v5p", "--target", "v6e", "--json"]) == 1
    out, error = capsys.readouterr()
    # A v5p has four SparseCores, a v6e two; nothing else is printed than the reports.
    assert [found["message"] for found in json.loads(out)] == [
        "ValueError: there are 4 cores",
        "ValueError: there are 2 cores",
    ]
    assert error.count("what the module prints") == 2


def test_a_missing_compiler_is_said(tmp_path, monkeypatch, capsys):
    stand_in = tmp_path / "python"
    stand_in.write_text("""#!/bin/sh\necho '{"missing": "has no module libtpu"}'\n""")
    stand_in.chmod(0o755)
    monkeypatch.setenv("COKERNEL_AOT_PYTHON", str(stand_in))
    assert command.main([*LOOKUP, "--target", "v6e"]) == 2
    assert "pip install 'cokernel[tpu]'" in capsys.readouterr().err
