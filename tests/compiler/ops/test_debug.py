"""Printing, callbacks and checks work from inside a kernel, and their errors come through."""

import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

TWO = cokernel.CoreMesh(core=2)
ROW = jax.ShapeDtypeStruct((2,), jnp.int32)


def launch(body, *arrays, out=ROW, mesh=TWO, scratch=(), workers=1, jit=False):
    kernel = cokernel.kernel(
        body,
        out,
        mesh=mesh,
        scratch_types=scratch,
        compiler_params=cokernel.CompilerParams(num_workers=workers, time_limit_s=60),
    )
    return jax.tree.map(np.asarray, (jax.jit(kernel) if jit else kernel)(*arrays))


def failure_of(body, *arrays, **params):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        launch(body, *arrays, **params)
    return str(caught.value)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_prints_name_their_core_and_keep_the_order_of_each(workers, jit, capsys):
    def greet(x_ref, out_ref):
        core = lax.axis_index("core")
        for turn in range(3):
            pl.debug_print("turn {} x {}", jnp.int32(turn), x_ref[core])
        out_ref[core] = 1

    launch(greet, np.array([5, 6], np.int32), workers=workers, jit=jit)
    lines = capsys.readouterr().out.splitlines()
    for core in range(2):
        mine = [line for line in lines if line.startswith(f"[greet core={core}] ")]
        assert mine == [f"[greet core={core}] turn {turn} x {5 + core}" for turn in range(3)]
    assert len(lines) == 6


def test_what_is_printed_is_formatted_as_python_does(capsys):
    def show(x_ref, out_ref):
        @pl.when(lax.axis_index("core") == 1)
        def _one():
            jax.debug.print("{a:.3f} {b:>6} {c}", a=x_ref[0] / 3, b=jnp.int8(-7), c=x_ref[0] > 0)
            jax.debug.print("{}", x_ref[...].astype(jnp.bfloat16))
            jax.debug.print("nothing")
            pl.debug_print("values", x_ref[0], jnp.uint8(9))
            jax.debug.print("static {} {x}", "text", x=3)

        out_ref[0] = 1

    launch(show, np.arange(1, 4, dtype=np.float32))
    assert capsys.readouterr().out.splitlines() == [
        "[show core=1] 0.333     -7 True",
        "[show core=1] [1 2 3]",
        "[show core=1] nothing",
        "[show core=1] values 1.0 9",
        "[show core=1] static text 3",
    ]


def test_a_ref_is_printed_whole_and_a_subcore_named_by_both_axes(capsys):
    with cokernel.target("v6e"):
        mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

        def show(x_ref, out_ref, here):
            core, subcore = lax.axis_index("core"), lax.axis_index("subcore")

            @pl.when((core == 1) & (subcore == 3))
            def _one():
                pltpu.sync_copy(x_ref, here)
                pl.debug_print("here {}", here)

        scratch = [pltpu.VMEM((8,), jnp.int32)]
        launch(show, np.arange(8, dtype=np.int32), mesh=mesh, scratch=scratch)
    assert capsys.readouterr().out == "[show core=1 subcore=3] here [0 1 2 3 4 5 6 7]\n"


def test_ordered_prints_and_the_log_are_understood(capsys, caplog):
    def show(out_ref):
        jax.debug.print("ordered {}", lax.axis_index("core"), ordered=True)
        with caplog.at_level(logging.INFO):
            jax.debug.log("logged {}", lax.axis_index("core"))

    with caplog.at_level(logging.INFO, logger="jax._src.debugging"):
        launch(show, mesh=cokernel.CoreMesh(core=1))
    assert "[show core=0] ordered 0" in capsys.readouterr().out
    assert "[show core=0] logged 0" in caplog.text


def test_prints_inside_loops_and_branches_happen_as_often_as_they_are_reached(capsys):
    def count(out_ref):
        core = lax.axis_index("core")

        @pl.loop(0, 4)
        def _turn(turn):
            @pl.when(turn % 2 == core)
            def _mine():
                pl.debug_print("{}", turn)

    launch(count)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[count core={turn % 2}] {turn}" for turn in (0, 2, 1, 3)]


@pytest.mark.parametrize("shape", [(), (7,), (3, 50), (0, 4)])
@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int8, ml_dtypes.bfloat16, np.float32], ids=lambda d: np.dtype(d).name
)
def test_a_pure_callback_gets_and_gives_arrays_of_any_shape_and_dtype(shape, dtype):
    x = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype)

    def swap(value):
        assert value.dtype == dtype
        assert value.shape == shape
        return (1 - value.astype(np.float32)).astype(dtype)

    def call(x_ref, out_ref):
        result = jax.pure_callback(swap, jax.ShapeDtypeStruct(shape, dtype), x_ref[...])
        out_ref[...] = result

    out = launch(call, x, out=jax.ShapeDtypeStruct(shape, dtype), mesh=cokernel.CoreMesh(core=1))
    np.testing.assert_array_equal(out, (1 - x.astype(np.float32)).astype(dtype))


def test_several_results_and_strided_operands_of_a_callback_keep_their_places():
    def both(x, y):
        return x.sum(), (x - y).astype(np.int32)

    def call(x_ref, out_ref):
        x = x_ref[...]
        types = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((5, 30), jnp.int32))
        total, difference = jax.pure_callback(both, types, x.T[:5], x[:, ::-1].T[:5])
        out_ref[...] = difference + total

    x = np.arange(30 * 40, dtype=np.int32).reshape(30, 40)
    out = launch(
        call, x, out=jax.ShapeDtypeStruct((5, 30), jnp.int32), mesh=cokernel.CoreMesh(core=1)
    )
    left, right = x.T[:5], x[:, ::-1].T[:5]
    np.testing.assert_array_equal(out, left - right + left.sum())


def test_an_io_callback_runs_once_for_each_core_even_if_its_result_is_unused():
    seen = []

    def note(core):
        seen.append(int(core))
        return np.int32(core * 10)

    def call(out_ref):
        core = lax.axis_index("core")
        jax.experimental.io_callback(note, jax.ShapeDtypeStruct((), jnp.int32), core)
        out_ref[core] = jax.experimental.io_callback(
            note, jax.ShapeDtypeStruct((), jnp.int32), core + 2
        )

    np.testing.assert_array_equal(launch(call), [20, 30])
    assert sorted(seen) == [0, 1, 2, 3]


def test_a_debug_callback_gets_the_values_of_the_moment():
    seen = []

    def call(x_ref, out_ref):
        core = lax.axis_index("core")
        out_ref[core] = x_ref[core]
        jax.debug.callback(lambda value: seen.append(int(value)), out_ref[core])
        out_ref[core] = 0

    launch(call, np.array([41, 42], np.int32))
    assert sorted(seen) == [41, 42]


def test_what_a_callback_is_given_stays_as_it_was():
    kept = []

    def call(x_ref, out_ref):
        def turn(number, carry):
            jax.debug.callback(kept.append, x_ref[...] * number)
            return carry

        lax.fori_loop(0, 3, turn, 0)
        out_ref[0] = 0

    x = np.arange(200, dtype=np.int32)
    launch(call, x, mesh=cokernel.CoreMesh(core=1))
    for number in range(3):
        np.testing.assert_array_equal(kept[number], x * number)


@pytest.mark.parametrize("workers", [1, 4])
def test_an_exception_names_type_message_core_and_line_and_the_next_launch_is_fine(workers):
    def fail(value):
        if value == 7:
            raise LookupError(f"no entry for {value}")

    def call(x_ref, out_ref):
        core = lax.axis_index("core")
        jax.debug.callback(fail, x_ref[core])  # the call
        out_ref[core] = x_ref[core]

    for _ in range(3):
        text = failure_of(call, np.array([1, 7], np.int32), workers=workers)
        assert "debug_callback called by program 'call' on core=1 raised LookupError" in text
        assert "no entry for 7" in text
        assert "jax.debug.callback(fail, x_ref[core])  # the call" in text
        np.testing.assert_array_equal(launch(call, np.array([1, 2], np.int32)), [1, 2])


def test_a_callback_that_returns_the_wrong_shape_is_an_error():
    def call(out_ref):
        result = jax.pure_callback(
            lambda: np.zeros((3,), np.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
        )
        out_ref[...] = result

    assert "returned int32[3] where int32[2] is expected" in failure_of(call)


def checked(x_ref, out_ref):
    core = lax.axis_index("core")
    checkify.check(x_ref[core] > 0, "x[{i}] is {x}, not positive", i=core, x=x_ref[core])
    out_ref[core] = x_ref[core]


def test_a_check_that_holds_changes_nothing():
    np.testing.assert_array_equal(launch(checked, np.array([3, 4], np.int32)), [3, 4])


def test_a_check_that_fails_gives_its_message_with_values_core_and_line():
    text = failure_of(checked, np.array([3, -4], np.int32))
    assert "Check: program 'checked' on core=1: x[1] is -4, not positive" in text
    assert "checkify.check(x_ref[core] > 0" in text
    assert "Traceback" not in text


def test_debug_checks_are_made_only_while_they_are_enabled():
    def body(x_ref, out_ref):
        core = lax.axis_index("core")
        pl.debug_check(x_ref[core] > 0, "not positive")
        out_ref[core] = x_ref[core]

    x = np.array([3, -4], np.int32)
    np.testing.assert_array_equal(launch(body, x), x)
    with pl.enable_debug_checks(True):
        assert "not positive" in failure_of(body, x)


def test_marks_for_the_tpus_profiler_and_touch_change_nothing():
    def body(x_ref, out_ref):
        core = lax.axis_index("core")
        pltpu.trace_value("core", core)
        pltpu.touch(x_ref)
        out_ref[core] = x_ref[core]

    np.testing.assert_array_equal(launch(body, np.array([3, 4], np.int32)), [3, 4])
