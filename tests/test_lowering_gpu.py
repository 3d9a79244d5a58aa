"""Kernels of GPU programs: merged into one, run in JAX's interpreter, refused with the reason."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

import cokernel
import cokernel.pallas
from cokernel import _jax
from cokernel.lowering import gpu_allocations
from tests import test_lowering_gpu_allocations as allocating

F32 = jnp.float32
LENGTH = 256
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
VECTOR = jax.ShapeDtypeStruct((LENGTH,), F32)


def mesh(name, threads=1, **others):
    return plgpu.Mesh(num_threads=threads, thread_name=name, **others)


def copy_in(x_ref, o_ref, tile, full, done):
    plgpu.copy_gmem_to_smem(x_ref, tile, full)


def scale_part(x_ref, o_ref, tile, full, done):
    me = lax.axis_index("consumer")
    plgpu.barrier_wait(full)

    # The index is asked for at some depth: in a loop, a branch, and what they call.
    def add(step, total):
        return lax.cond(step > 1, lambda: total + lax.axis_index("consumer"), lambda: total)

    added = lax.fori_loop(0, 4, add, 0)
    part = pl.ds(me * (LENGTH // 2), LENGTH // 2)
    o_ref[part] = tile[part] * 3 + added.astype(F32)


SCRATCH = [plgpu.SMEM((LENGTH,), F32), plgpu.Barrier(), plgpu.Barrier()]


def two_programs(consume=scale_part, **options):
    return cokernel.mpmd_map(
        [(mesh("producer"), copy_in), (mesh("consumer", 2), consume)],
        VECTOR,
        scratch_types=SCRATCH,
        **{"interpret": INTERPRET, **options},
    )


def test_two_programs_equal_numpy_and_are_free_of_races():
    # Integers, of which a fused multiplication and addition makes the same.
    x = np.random.default_rng(0).integers(-99, 99, LENGTH).astype(np.float32)
    expected = x * 3 + np.repeat(np.float32([0, 2]), LENGTH // 2)
    np.testing.assert_array_equal(two_programs()(x), expected)


def test_what_programs_allocate_themselves_is_not_the_same_memory():
    def program(name, value):
        def body(o_ref, written):
            def fill(own):
                own[...] = jnp.full((LENGTH,), value, F32)
                plgpu.barrier_arrive(written)
                # By now the other program has filled its own.
                plgpu.barrier_wait(written)
                o_ref[value] = own[...]

            pl.run_scoped(fill, plgpu.SMEM((LENGTH,), F32), collective_axes=name)

        return mesh(name), body

    kernel = cokernel.mpmd_map(
        [program("first", 0), program("second", 1)],
        jax.ShapeDtypeStruct((2, LENGTH), F32),
        scratch_types=[plgpu.Barrier(num_arrivals=2)],
        interpret=INTERPRET,
    )
    expected = np.repeat(np.float32([0, 1]), LENGTH).reshape(2, LENGTH)
    np.testing.assert_array_equal(kernel(), expected)


def test_jax_itself_refuses_two_programs():
    kernel = _jax.stock_mpmd_map(
        [(mesh("producer"), lambda o_ref: None), (mesh("producer"), lambda o_ref: None)], VECTOR
    )
    with pytest.raises(NotImplementedError):
        jax.jit(kernel).trace().lower(lowering_platforms=("cuda",))


def test_a_kernel_that_hangs_ends_with_an_error_and_the_next_one_runs():
    def wait_for_nobody(x_ref, o_ref, tile, full, done):
        plgpu.barrier_wait(done)

    limited = cokernel.CompilerParams(time_limit_s=1)
    x = np.ones(LENGTH, np.float32)
    with pytest.raises(Exception, match="had not ended after 1 s in JAX's GPU interpreter"):
        jax.block_until_ready(two_programs(wait_for_nobody, compiler_params=limited)(x))
    expected = 3 + np.repeat(np.float32([0, 2]), LENGTH // 2)
    np.testing.assert_array_equal(two_programs()(x), expected)


def test_a_derivative_of_a_kernel_with_barriers_is_refused_with_what_to_do():
    x = np.ones(LENGTH, np.float32)
    with pytest.raises(NotImplementedError, match=r"program copy_in at .* uses barriers of a GPU"):
        jax.jvp(two_programs(), (x,), (x,))

    def allocates(x_ref, o_ref):
        pl.run_scoped(lambda full: None, plgpu.Barrier())

    kernel = cokernel.kernel(allocates, VECTOR, mesh=mesh("only"), interpret=INTERPRET)
    with pytest.raises(NotImplementedError, match=r"one with jax\.custom_jvp or jax\.custom_vjp"):
        jax.jvp(kernel, (x,), (x,))


def test_a_kernel_without_barriers_has_a_derivative():
    def square(x_ref, o_ref):
        o_ref[...] = x_ref[...] * x_ref[...]

    x = np.arange(LENGTH, dtype=np.float32)
    kernel = cokernel.kernel(square, VECTOR, mesh=mesh("only"), interpret=INTERPRET)
    _, tangents = jax.jvp(kernel, (x,), (np.ones_like(x),))
    np.testing.assert_array_equal(tangents, 2 * x)


def test_a_race_is_an_error():
    def do_not_wait(x_ref, o_ref, tile, full, done):
        part = pl.ds(lax.axis_index("consumer") * (LENGTH // 2), LENGTH // 2)
        o_ref[part] = tile[part]
        plgpu.barrier_wait(full)

    with pytest.raises(Exception, match="RACE DETECTED"):
        jax.block_until_ready(two_programs(do_not_wait)(np.ones(LENGTH, np.float32)))


def test_without_a_meeting_at_the_entrance_of_a_loops_memory_there_is_a_race(monkeypatch):
    x = np.ones(LENGTH, np.float32)
    # So the test can fail that such a kernel is free of races.
    meet = gpu_allocations._Hoister._all_threads_meet
    monkeypatch.setattr(
        gpu_allocations._Hoister, "_all_threads_meet", lambda *args: (meet(*args)[0], [])
    )

    def exchange_often():
        # A thread that wakes late joins the clock of an arrival after the one it waited for, and
        # in such a run JAX's interpreter sees no race.
        for _ in range(100):
            jax.block_until_ready(allocating.kernel(allocating.exchange, 2)(x))

    with pytest.raises(Exception, match="RACE DETECTED"):
        exchange_often()


def test_a_loop_that_never_ends_and_uses_no_memory_is_stopped_too():
    def go_round(x_ref, o_ref, tile, full, done):
        plgpu.barrier_wait(full)

        @pl.when(lax.axis_index("consumer") == 1)
        def _second():
            last = lax.while_loop(lambda i: i >= 0, lambda i: (i + 1) % 100, 0)
            o_ref[0] = last.astype(F32)

    limited = cokernel.CompilerParams(time_limit_s=1)
    x = np.ones(LENGTH, np.float32)
    with pytest.raises(Exception, match=r"had not ended after 1 s .* a loop does not end"):
        jax.block_until_ready(two_programs(go_round, compiler_params=limited)(x))
    expected = 3 + np.repeat(np.float32([0, 2]), LENGTH // 2)
    np.testing.assert_array_equal(two_programs()(x), expected)


def calls_on_gpu(kernel):
    lowered = jax.jit(kernel).trace(VECTOR).lower(lowering_platforms=("cuda",))
    return [line for line in lowered.as_text().splitlines() if "@mosaic_gpu" in line]


def prints(x_ref, o_ref, tile, full, done):
    pl.debug_print("core {}", lax.axis_index("consumer"))


@pytest.mark.parametrize(
    ("consume", "given", "expected"),
    [
        (scale_part, None, False),
        (scale_part, plgpu.CompilerParams(), False),
        (scale_part, cokernel.CompilerParams(has_side_effects=True), True),
        (prints, None, True),
        (prints, plgpu.CompilerParams(), True),
    ],
)
def test_a_kernel_with_side_effects_is_a_call_with_them(consume, given, expected):
    [call] = calls_on_gpu(two_programs(consume, interpret=False, compiler_params=given))
    assert ("has_side_effect = true" in call) == expected


@pytest.mark.parametrize("name", ["ünï", "1st", 'a "b"', "", "x" * 300])
@pytest.mark.parametrize("programs", [1, 2])
def test_the_assembler_gets_a_name_that_it_can_take(name, programs):
    if programs == 2:
        kernel = two_programs(interpret=False, name=name)
    else:
        kernel = cokernel.kernel(lambda x_ref, o_ref: None, VECTOR, mesh=mesh("only"), name=name)
    [call] = calls_on_gpu(kernel)
    symbols = re.findall(r"\\00(\w{1,110})_mosaic_gpu\\00", call)
    assert symbols
    assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", symbol) for symbol in symbols)


def test_meshes_of_one_kernel_differ_only_in_their_threads():
    wide = mesh("consumer", grid=(2,), grid_names=("row",))
    with pytest.raises(ValueError, match=r"differ only in their threads, but .* different grid"):
        cokernel.mpmd_map([(mesh("producer"), copy_in), (wide, scale_part)], VECTOR)
    with pytest.raises(ValueError, match="both have a thread axis named 'same'"):
        cokernel.mpmd_map([(mesh("same"), copy_in), (mesh("same"), scale_part)], VECTOR)


def test_a_cpu_says_how_to_interpret_a_kernel():
    with pytest.raises(NotImplementedError, match=r"pass interpret=plgpu\.InterpretGPUParams"):
        two_programs(interpret=False)(np.ones(LENGTH, np.float32))


def test_kernels_of_cpu_cores_are_refused_to_a_gpu():
    kernel = cokernel.kernel(lambda o_ref: None, VECTOR, mesh=cokernel.CoreMesh(core=2), name="k")
    with pytest.raises(NotImplementedError, match="kernel 'k' cannot run on a GPU"):
        jax.jit(kernel).trace().lower(lowering_platforms=("cuda",))


def test_rocm_is_left_to_jax_for_one_program_and_refused_for_several():
    with pytest.raises(NotImplementedError, match=r"has 2 programs, on .* but on rocm .* only one"):
        jax.jit(two_programs(interpret=False)).trace(VECTOR).lower(lowering_platforms=("rocm",))

    def triple(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 3

    kernel = cokernel.kernel(triple, VECTOR, mesh=plgpu.Mesh(), name="triple")
    with pytest.raises(NotImplementedError, match="not supported in the Triton backend"):
        jax.jit(kernel).trace(VECTOR).lower(lowering_platforms=("rocm",))


def test_kernels_are_interpreted_also_where_stock_kernels_run_on_cokernel():
    x = np.ones(LENGTH, np.float32)
    with cokernel.pallas.enabled():
        expected = 3 + np.repeat(np.float32([0, 2]), LENGTH // 2)
        np.testing.assert_array_equal(two_programs()(x), expected)


def test_parameters_of_mosaic_gpu_are_for_gpu_programs():
    given = plgpu.CompilerParams(approx_math=True)
    text = jax.jit(two_programs(interpret=False, compiler_params=given)).trace(VECTOR)
    assert "mosaic_gpu" in text.lower(lowering_platforms=("cuda",)).as_text()
    kernel = cokernel.kernel(
        lambda o_ref: None, VECTOR, mesh=cokernel.CoreMesh(core=2), compiler_params=given
    )
    with pytest.raises(TypeError, match="a kernel without GPU programs cannot have"):
        kernel()


def test_parameters_of_mosaic_for_tpus_are_refused_to_a_gpu_by_the_kernels_name():
    kernel = two_programs(interpret=False, compiler_params=pltpu.CompilerParams(), name="k")
    with pytest.raises(NotImplementedError, match=r"kernel 'k' has pltpu.* mean nothing on a GPU"):
        jax.jit(kernel).trace(VECTOR).lower(lowering_platforms=("cuda",))
