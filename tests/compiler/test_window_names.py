"""What a pipeline allocates is called by the operand it belongs to, in either form of pipelines."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel.compiler.kernel import Kernel
from cokernel.compiler.window_names import element_name, operand_of, semaphore_in_words
from tests.compiler.checked_harness import compile_kernel
from tests.compiler.harness import MESH

ROWS, BLOCK = 32, 8
OUT = jax.ShapeDtypeStruct((ROWS, 128), jnp.float32)
SPEC = pl.BlockSpec((BLOCK, 128), lambda i: (i, 0))
WHOLE = pl.BlockSpec((ROWS, 128), lambda i: (0, 0))


@pytest.fixture(autouse=True)
def chip(form):
    """Runs a test with pipelines of each form, for a chip."""
    with cokernel.target("v6e"):
        yield


@pytest.fixture
def allocated(monkeypatch):
    """Collects the names of the Refs that programs allocate while they run."""
    monkeypatch.setenv("COKERNEL_CACHE", "")
    names = []
    plan = Kernel._plan_program

    def watched(kernel, number):
        original = kernel.layout._ref
        kernel.layout._ref = lambda aval, name, *rest: (
            names.append(name) or original(aval, name, *rest)
        )
        return plan(kernel, number)

    monkeypatch.setattr(Kernel, "_plan_program", watched)
    return names


def launch(body, *, inputs=2, scratch=()):
    kernel = cokernel.kernel(body, OUT, mesh=MESH, scratch_types=scratch)
    return jax.block_until_ready(kernel(*[jnp.ones((ROWS, 128))] * inputs))


def add(x, y, o):
    o[...] = x[...] + y[...]


def both(*names):
    return [name for window in names for name in (window, f"semaphore of {window}")]


def test_windows_and_their_semaphores_are_named_by_their_operands(allocated):
    def body(x_ref, weights_ref, o_ref):
        pltpu.emit_pipeline(add, grid=(4,), in_specs=[SPEC, SPEC], out_specs=SPEC)(
            x_ref, weights_ref, o_ref
        )

    launch(body)
    assert allocated == both("window of x_ref", "window of weights_ref", "window of o_ref")


@pytest.mark.parametrize("no_pipelining", [False, True])
def test_a_window_of_the_whole_operand_is_named_although_it_has_no_semaphore(
    allocated, no_pipelining
):
    def body(x_ref, weights_ref, o_ref):
        def inner(x, weights, o):
            o[...] = x[...] + weights[0:BLOCK]

        pltpu.emit_pipeline(
            inner,
            grid=(4,),
            in_specs=[SPEC, WHOLE],
            out_specs=SPEC,
            no_pipelining=no_pipelining,
        )(x_ref, weights_ref, o_ref)

    launch(body)
    for name in ("x_ref", "weights_ref", "o_ref"):
        assert f"window of {name}" in allocated
    assert not any("allocations" in name for name in allocated)


def test_copies_of_the_body_do_not_tell_whose_a_window_is(allocated):
    def body(x_ref, weights_ref, o_ref, kept, done):
        def inner(x, weights, o):
            pltpu.async_copy(weights.at[0:BLOCK], kept, done).wait()
            pltpu.async_copy(x, kept, done).wait()
            pltpu.async_copy(kept, o, done).wait()

        pltpu.emit_pipeline(inner, grid=(4,), in_specs=[SPEC, WHOLE], out_specs=SPEC)(
            x_ref, weights_ref, o_ref
        )

    launch(body, scratch=[pltpu.VMEM((BLOCK, 128), jnp.float32), pltpu.SemaphoreType.DMA])
    for name in ("x_ref", "weights_ref", "o_ref"):
        assert f"window of {name}" in allocated


def test_an_operand_with_several_windows_tells_which(allocated):
    def body(x_ref, o_ref):
        pltpu.emit_pipeline(add, grid=(4,), in_specs=[SPEC, SPEC], out_specs=SPEC)(
            x_ref, x_ref, o_ref
        )

    launch(body, inputs=1)
    assert allocated == both("window 0 of x_ref", "window 1 of x_ref", "window of o_ref")


def test_each_of_several_pipelines_is_named_by_its_own_operands(allocated):
    def body(x_ref, y_ref, o_ref):
        def copy(x, o):
            o[...] = x[...]

        pipeline = pltpu.emit_pipeline(copy, grid=(4,), in_specs=[SPEC], out_specs=SPEC)
        pipeline(x_ref, o_ref)
        pipeline(y_ref.at[0:ROWS], o_ref)

    launch(body)
    first = both("window of x_ref", "window of o_ref")
    assert allocated == [*first, *both("window of y_ref", "window of o_ref")]


def test_one_function_called_with_several_operands_names_each(allocated):
    def body(x_ref, y_ref, o_ref):
        @jax.jit
        def copied(ref):
            def copy(x, o):
                o[...] = x[...]

            pltpu.emit_pipeline(copy, grid=(4,), in_specs=[SPEC], out_specs=SPEC)(ref, o_ref)

        copied(x_ref)
        copied(y_ref)

    launch(body)
    assert "window of x_ref" in allocated
    assert "window of y_ref" in allocated


def test_the_window_of_a_window_is_told_as_such(allocated):
    def body(x_ref, o_ref):
        def outer(x, o):
            def inner(part, out):
                out[...] = part[...]

            half = pl.BlockSpec((BLOCK, 128), lambda i: (i, 0))
            hbm = pl.BlockSpec((BLOCK, 128), lambda i: (i, 0), memory_space=pltpu.VMEM)
            pltpu.emit_pipeline(inner, grid=(1,), in_specs=[half], out_specs=[hbm])(x, o)

        pltpu.emit_pipeline(outer, grid=(4,), in_specs=[SPEC], out_specs=[SPEC])(x_ref, o_ref)

    launch(body, inputs=1)
    assert allocated[:4] == both("window of x_ref", "window of o_ref")
    assert not any("allocations" in name or "carry" in name for name in allocated)


def test_where_the_grid_is_dynamic_the_operands_are_found_in_a_while_loop(allocated):
    def body(n_ref, x_ref, o_ref):
        def copy(x, o):
            o[...] = x[...]

        pltpu.emit_pipeline(copy, grid=(n_ref[0],), in_specs=[SPEC], out_specs=SPEC)(x_ref, o_ref)

    kernel = cokernel.kernel(body, OUT, mesh=MESH)
    jax.block_until_ready(kernel(jnp.asarray([4], jnp.int32), jnp.ones((ROWS, 128))))
    assert allocated == both("window of x_ref", "window of o_ref")


def test_a_window_with_no_single_operand_says_so(allocated, form):
    if form:
        pytest.skip("a primitive pipeline is given no allocations that others use as well")

    def body(x_ref, y_ref, o_ref):
        def copy(x, o):
            o[...] = x[...]

        pipeline, allocate = pltpu.emit_pipeline_with_allocations(
            copy, grid=(4,), in_specs=(SPEC,), out_specs=(SPEC,)
        )

        def scope(mine):
            pipeline(x_ref, o_ref, allocations=mine)
            pipeline(y_ref, o_ref, allocations=mine)

        pl.run_scoped(scope, allocate(x_ref, o_ref))

    launch(body)
    assert allocated == both("window 0 of emit_pipeline", "window of o_ref")


def test_the_users_own_names_stay(allocated):
    def body(x_ref, o_ref):
        def scope(window_ref, sem_recvs):
            pltpu.async_copy(x_ref, window_ref, sem_recvs).wait()
            pltpu.async_copy(window_ref, o_ref, sem_recvs).wait()

        pl.run_scoped(scope, pltpu.VMEM((ROWS, 128), jnp.float32), pltpu.SemaphoreType.DMA)

    launch(body, inputs=1)
    assert allocated == ["window_ref", "sem_recvs"]


def test_the_slots_of_windows_are_described():
    def body(x_ref, y_ref, o_ref):
        mode = {"pipeline_mode": pl.Buffered(3)}
        three = pl.BlockSpec((BLOCK, 128), lambda i: (i, 0), **mode)
        pltpu.emit_pipeline(add, grid=(4,), in_specs=[three, WHOLE], out_specs=SPEC)(
            x_ref, y_ref, o_ref
        )

    def add(x, y, o):
        o[...] = x[...] + y[0:BLOCK]

    kernel = cokernel.kernel(body, OUT, mesh=MESH)
    x = jnp.ones((ROWS, 128))
    memory = compile_kernel(kernel, x, x, checked=cokernel.Checked()).memory
    told = {ref["name"]: (ref["slots"], ref["is_fetched"]) for ref in memory["refs"]}
    assert told["window of x_ref"] == (3, True)
    assert told["window of y_ref"] == (0, False), "all of it is there at once"
    assert told["window of o_ref"] == (2, False)
    assert told["x_ref"] == told["semaphore of window of x_ref"] == (0, False)


def test_a_window_is_told_with_its_operand():
    assert operand_of("window of x_ref") == operand_of("window 1 of x_ref") == "'x_ref'"
    assert operand_of("window 1 of emit_pipeline") == "the operand"


def test_parts_are_told_in_words_where_the_name_is():
    assert element_name("x_ref", "[0:4]") == "x_ref[0:4]"
    assert element_name("window of x_ref", "[0:4]") == "[0:4] of the window of x_ref"
    assert element_name("window of x_ref", "") == "window of x_ref"
    assert element_name("window of x_ref", " (8 bytes)") == "window of x_ref (8 bytes)"
    assert element_name("semaphore of window of x_ref", "[1]") == "semaphore 1 of window of x_ref"
    assert semaphore_in_words("done") == "semaphore 'done'"
    assert (
        semaphore_in_words("semaphore 1 of window of x_ref") == "'semaphore 1 of window of x_ref'"
    )
