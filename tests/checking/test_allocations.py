"""Whatever nobody has written, its finding says which line asked for that memory."""

import functools
import importlib
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import source_lines

X = jnp.ones(8)
ROWS = jnp.ones((2, 8))
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("device",))

TRANSFORMATIONS = {
    "eager": lambda kernel: kernel(X),
    "jit": lambda kernel: jax.jit(lambda x: kernel(x) + 1)(X),
    "vmap": lambda kernel: jax.vmap(kernel)(ROWS),
    "jit_of_vmap": lambda kernel: jax.jit(jax.vmap(kernel))(ROWS),
    "scan": lambda kernel: jax.lax.scan(lambda carry, x: (carry, kernel(x)), 0, ROWS)[1],
    "shard_map": lambda kernel: jax.jit(
        jax.shard_map(kernel, mesh=MESH, in_specs=_spec(), out_specs=_spec(), check_vma=False)
    )(X),
    "jvp": lambda kernel: jax.jvp(kernel, (X,), (X,))[0],
}


def _spec():
    return jax.sharding.PartitionSpec()


def own_scratch(x_ref, out_ref, kept):
    out_ref[...] = x_ref[...] + kept[...]


def adds_to_the_output(x_ref, out_ref, kept):
    out_ref[...] += x_ref[...]


def half_of_the_output(x_ref, out_ref, kept):
    out_ref[0:4] = x_ref[0:4]


BODIES = {
    "scratch": (own_scratch, "UninitialisedRead", "kept"),
    "output": (adds_to_the_output, "UninitialisedRead", "out_ref"),
    "never": (half_of_the_output, "NeverWritten", "out_ref"),
}


def mesh_for(is_stock):
    if not is_stock:
        return cokernel.CoreMesh(core=1)
    with cokernel.target("v6e"):
        return pltpu.TensorCoreMesh(axis_name="core", num_cores=1)


def made(is_stock, body):
    make = pl.kernel if is_stock else cokernel.kernel
    return make(  # the kernel's line
        body,
        jax.ShapeDtypeStruct((8,), jnp.float32),
        mesh=mesh_for(is_stock),
        scratch_types=[pltpu.VMEM((8,), jnp.float32)],
    )


def line_of(function, text):
    """The first line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def found_in(run, kind):
    options = cokernel.Checked(chip_limits="off")
    with cokernel.target("v6e"):
        report = cokernel.explore(run, schedules=1, options=options)
    assert {finding.kind for finding in report.findings} == {kind}, str(report)
    return report.findings[0]


def check_told(finding, line, code):
    place = f"{__file__}:{line}"
    assert f"  allocated by the kernel at {place}" in finding.text()
    assert f"        {code}\n" in finding.text()
    plain = json.loads(json.dumps(finding.to_dict()))
    told = plain["allocation"]
    assert (told["file"], told["line"], told["code"]) == (__file__, line, code)
    assert plain["parties"][-1] == told
    assert cokernel.Finding.from_dict(plain) == finding


@pytest.mark.parametrize("what", BODIES)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("is_stock", [False, True], ids=["native", "stock"])
def test_of_memory_that_lasts_as_long_as_the_launch_the_kernels_line_is_told(
    is_stock, transformation, what
):
    body, kind, name = BODIES[what]
    with cokernel.pallas.enabled():
        kernel = made(is_stock, body)
        finding = found_in(lambda: TRANSFORMATIONS[transformation](kernel), kind)
    assert finding.name == name
    check_told(finding, line_of(made, "return make("), "return make(  # the kernel's line")


def test_the_exception_of_a_launch_tells_it():
    kernel = made(False, own_scratch)
    line = line_of(made, "return make(")
    with (
        cokernel.checked(),
        pytest.raises(jax.errors.JaxRuntimeError) as raised,
    ):
        jax.block_until_ready(kernel(X))
    assert f"allocated by the kernel at {__file__}:{line} in made" in str(raised.value)


def test_kernels_of_one_body_are_told_by_their_own_lines():
    scratch = [pltpu.VMEM((8,), jnp.float32)]
    make = functools.partial(
        cokernel.kernel, own_scratch, mesh=cokernel.CoreMesh(core=1), scratch_types=scratch
    )
    out = jax.ShapeDtypeStruct((8,), jnp.float32)
    first = make(out)
    second = make(out)
    lines = [
        found_in(functools.partial(kernel, X), "UninitialisedRead").allocation.line
        for kernel in (first, second)
    ]
    here = test_kernels_of_one_body_are_told_by_their_own_lines
    assert lines == [line_of(here, "first = make("), line_of(here, "second = make(")]


@pytest.mark.parametrize("is_stock", [False, True], ids=["native", "stock"])
def test_of_a_decorated_program_the_decorators_line_is_told(is_stock):
    make = pl.kernel if is_stock else cokernel.kernel
    with cokernel.pallas.enabled():

        @make(
            out_type=jax.ShapeDtypeStruct((8,), jnp.float32),
            mesh=mesh_for(is_stock),
            scratch_types={"kept": pltpu.VMEM((8,), jnp.float32)},
        )
        def program(x_ref, out_ref, kept):
            out_ref[...] = x_ref[...] + kept[...]

        finding = found_in(lambda: program(X), "UninitialisedRead")
    here = test_of_a_decorated_program_the_decorators_line_is_told
    assert finding.allocation.line == line_of(here, "@make(")


def test_a_stock_kernel_made_before_it_was_enabled_is_told_by_its_program():
    kernel = made(True, own_scratch)
    with cokernel.pallas.enabled():
        finding = found_in(lambda: kernel(X), "UninitialisedRead")
    check_told(finding, line_of(own_scratch, "def"), "def own_scratch(x_ref, out_ref, kept):")


def test_the_lines_survive_the_cache_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("COKERNEL_CACHE", str(tmp_path))
    for _ in range(2):
        finding = found_in(lambda: made(False, own_scratch)(X), "UninitialisedRead")
        check_told(finding, line_of(made, "return make("), "return make(  # the kernel's line")
        jax.clear_caches()


def kernel_with_scopes(body):
    return cokernel.kernel(
        body, jax.ShapeDtypeStruct((8,), jnp.float32), mesh=cokernel.CoreMesh(core=1)
    )


def test_of_scopes_that_call_their_memory_alike_the_right_one_is_told():
    def body(x_ref, out_ref):
        def fill(own):
            own[...] = x_ref[...]

        def use(own):
            out_ref[...] = own[...]

        pl.run_scoped(fill, pltpu.VMEM((8,), jnp.float32))
        pl.run_scoped(use, pltpu.VMEM((8,), jnp.float32))

    finding = found_in(lambda: kernel_with_scopes(body)(X), "UninitialisedRead")
    assert finding.allocation.code == "pl.run_scoped(use, pltpu.VMEM((8,), jnp.float32))"
    assert finding.allocation.program == "body"


def test_of_a_scope_the_line_is_told_though_the_value_travels_through_other_memory():
    def body(x_ref, out_ref):
        def outer(relay):
            def inner(own):
                own[0:4] = x_ref[0:4]
                pltpu.sync_copy(own, relay)

            pl.run_scoped(inner, pltpu.VMEM((8,), jnp.float32))
            out_ref[...] = relay[...]

        pl.run_scoped(outer, pltpu.VMEM((8,), jnp.float32))

    finding = found_in(lambda: kernel_with_scopes(body)(X), "UninitialisedRead")
    assert finding.name == "own"
    assert finding.allocation.code.startswith("pl.run_scoped(inner,")


def test_who_asked_for_the_memory_is_none_of_those_that_did_the_same():
    def body(out_ref, kept):
        out_ref[jax.lax.axis_index("core")] = kept[0]

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((3,), jnp.float32),
        mesh=cokernel.CoreMesh(core=3),
        scratch_types=[pltpu.HBM((8,), jnp.float32)],
    )
    report = cokernel.explore(kernel, schedules=4)
    [finding] = report.of_kind("UninitialisedRead")
    cores = {f"core={number}" for number in range(3)}
    assert all(set(others) <= cores for others in finding.also)
    own = finding.acting_cores
    assert len(own) == 2
    assert own not in finding.also
    assert "met 12 times, also with core=" in finding.text()
    assert " and ;" not in finding.text()


@pytest.mark.parametrize("is_stock", [False, True], ids=["native", "stock"])
def test_who_called_a_helper_that_makes_kernels_is_told(is_stock):
    def helper():
        return made(is_stock, own_scratch)

    with cokernel.pallas.enabled():
        kernel = helper()  # Called from here.
        finding = found_in(lambda: kernel(X), "UninitialisedRead")
    callers = finding.allocation.callers
    assert [caller["code"] for caller in callers] == [
        "return made(is_stock, own_scratch)",
        "kernel = helper()  # Called from here.",
    ]
    # Beyond the test there is pytest, which is nobody's kernel.
    assert {caller["file"] for caller in callers} == {__file__}
    text = finding.text()
    place = text.index("allocated by the kernel at")
    assert "called at" in text[place:]
    assert "        kernel = helper()  # Called from here.\n" in text[place:]


def test_a_helper_that_is_installed_is_told_with_its_user(tmp_path, monkeypatch):
    source = "import cokernel\ndef make(body, **rest):\n    return cokernel.kernel(body, **rest)\n"
    (tmp_path / "installed_helper.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(source_lines, "_LIBRARIES", (*source_lines._LIBRARIES, str(tmp_path)))
    helper = importlib.import_module("installed_helper")
    kernel = helper.make(
        own_scratch,
        out_type=jax.ShapeDtypeStruct((8,), jnp.float32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[pltpu.VMEM((8,), jnp.float32)],
    )
    allocation = found_in(lambda: kernel(X), "UninitialisedRead").allocation
    assert allocation.file == helper.__file__
    assert [caller["code"] for caller in allocation.callers] == ["kernel = helper.make("]


@pytest.mark.parametrize("is_stock", [False, True], ids=["native", "stock"])
def test_callers_of_what_makes_a_kernel_do_not_go_on_into_cokernel(is_stock):
    def run(x):
        return made(is_stock, own_scratch)(x)

    with cokernel.pallas.enabled():
        allocation = found_in(lambda: run(X), "UninitialisedRead").allocation
    assert allocation.callers
    assert {caller["file"] for caller in allocation.callers} == {__file__}
