"""What GPU programs may contain and still be merged; each runs in JAX's interpreter and is lowered.

`tests/aot` compiles kernels to the end.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cokernel
from cokernel import _jax, primitive
from cokernel.lowering import gpu_merge

F32, F16 = jnp.float32, jnp.float16
LENGTH = 128
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
PRODUCER = plgpu.Mesh(num_threads=1, thread_name="producer")
CONSUMER = plgpu.Mesh(num_threads=2, thread_name="consumer")


def rows(count):
    return jax.ShapeDtypeStruct((count, LENGTH), F32)


@pytest.fixture
def x():
    # Integers, of which a fused multiplication and addition makes the same.
    return np.random.default_rng(0).integers(-99, 99, (4, LENGTH)).astype(np.float32)


def do_nothing(*refs):
    del refs


def check(expected, programs, out_type, *args, scratch_types=(), **options):
    """Checks a kernel's result in the interpreter, and that Mosaic GPU takes it."""

    def kernel(interpret):
        return cokernel.mpmd_map(
            programs, out_type, scratch_types=scratch_types, interpret=interpret, **options
        )

    np.testing.assert_array_equal(kernel(INTERPRET)(*args), expected)
    lowered = jax.jit(kernel(False)).trace(*args).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu") == 1


def check_consumer(expected, consume, out_type, *args, **options):
    """Checks a program of two threads beside one that does nothing and comes first."""
    check(expected, [(PRODUCER, do_nothing), (CONSUMER, consume)], out_type, *args, **options)


def test_a_program_counts_its_own_threads_at_every_depth(x):
    def consume(x_ref, o_ref):
        def add_row(row, total):
            factor = lax.cond(row > 0, lambda: 1 + lax.axis_index("consumer"), lambda: 1)
            return total + x_ref[row] * factor.astype(F32)

        def count(state):
            steps, total = state
            return steps + 1, total + lax.axis_index("consumer")

        total = lax.fori_loop(0, 4, add_row, jnp.zeros((LENGTH,), F32))
        _, counted = lax.while_loop(
            lambda state: state[0] < 2 + lax.axis_index("consumer"), count, (0, 0)
        )
        o_ref[lax.axis_index("consumer")] = total + counted.astype(F32)

    rest = x[1:].sum(0)
    check_consumer(np.stack([x[0] + rest, x[0] + 2 * rest + 3]), consume, rows(2), x)


def test_a_program_calls_functions_that_use_refs_and_count_threads(x):
    @jax.jit
    def put(o_ref, row, value):
        o_ref[row] = value + lax.axis_index("consumer")
        return jax.nn.relu(value) + 1

    def consume(x_ref, o_ref):
        me = lax.axis_index("consumer")

        # The same function twice, once within a loop.
        @pl.loop(0, 1)
        def _once(_):
            put(o_ref, 2 * me + 1, put(o_ref, 2 * me, x_ref[me]))

    positive = np.maximum(x, 0)
    expected = np.stack([x[0], positive[0] + 1, x[1] + 1, positive[1] + 2])
    check_consumer(expected, consume, rows(4), x)


def test_three_programs_one_of_which_has_no_name_for_its_thread(x):
    def alone(x_ref, o_ref):
        o_ref[2] = x_ref[2] * 5

    def consume(x_ref, o_ref):
        me = lax.axis_index("consumer")
        o_ref[me] = x_ref[me] * lax.axis_size("consumer")

    def last(x_ref, o_ref):
        o_ref[3] = x_ref[3] + lax.axis_index("producer")

    programs = [(plgpu.Mesh(), alone), (CONSUMER, consume), (PRODUCER, last)]
    expected = x * np.float32([[2], [2], [5], [1]])
    check(expected, programs, rows(4), x)


def test_threads_are_counted_together_with_a_grid_and_a_cluster(x):
    shape = {
        "grid": (2,),
        "grid_names": ("row",),
        "cluster": (1,),
        "cluster_names": ("part",),
    }

    def consume(x_ref, o_ref):
        @plgpu.nd_loop((4,), collective_axes=("row", "consumer"))
        def _each(info):
            [row] = info.index
            o_ref[row] = x_ref[row] + lax.axis_index(("row", "consumer")) + lax.axis_index("part")

    programs = [
        (plgpu.Mesh(**shape, num_threads=1, thread_name="producer"), do_nothing),
        (plgpu.Mesh(**shape, num_threads=2, thread_name="consumer"), consume),
    ]
    check(x + np.arange(4, dtype=np.float32)[:, None], programs, rows(4), x)


def test_a_program_maps_over_the_warps_of_its_thread(x):
    def consume(x_ref, o_ref, tile, full):
        me = lax.axis_index("consumer")

        @plgpu.warp_map
        def _warps(warp):
            @pl.when(warp == 0)
            def _first():
                mine = lax.axis_index("consumer")
                plgpu.copy_gmem_to_smem(x_ref.at[mine], tile.at[mine], full.at[mine])

        plgpu.barrier_wait(full.at[me])
        o_ref[me] = tile[me] * 2

    scratch = [plgpu.SMEM((2, LENGTH), F32), plgpu.Barrier(num_barriers=2)]
    check_consumer(x[:2] * 2, consume, rows(2), x, scratch_types=scratch)


@pytest.mark.parametrize("dtype", ["int32", "float32", "bool", "bfloat16"])
def test_programs_close_over_scalars_that_are_computed_outside(dtype, x):
    def run(scale, x, interpret):
        def consume(x_ref, o_ref):
            me = lax.axis_index("consumer")
            o_ref[me] = x_ref[me] * scale.astype(F32)

        def produce(x_ref, o_ref):
            o_ref[2] = x_ref[2] * scale.astype(F32)

        return cokernel.mpmd_map(
            [(PRODUCER, produce), (CONSUMER, consume)], rows(3), interpret=interpret
        )(x)

    scale = jnp.asarray(3, dtype)
    result = jax.jit(run, static_argnums=2)(scale, x, INTERPRET)
    np.testing.assert_array_equal(result, x[:3] * np.float32(scale))
    lowered = jax.jit(run, static_argnums=2).trace(scale, x, False)
    assert "@mosaic_gpu" in lowered.lower(lowering_platforms=("cuda",)).as_text()


def test_programs_read_and_write_a_ref_of_the_caller(x):
    def increase(x):
        ref = jax.new_ref(x)

        def consume(ref):
            me = lax.axis_index("consumer")
            ref[me] = ref[me] + 1

        cokernel.mpmd_map([(PRODUCER, do_nothing), (CONSUMER, consume)], (), interpret=INTERPRET)(
            ref
        )
        return jax.freeze(ref)

    np.testing.assert_array_equal(jax.jit(increase)(x), x + np.float32([[1], [1], [0], [0]]))


def test_memory_is_allocated_where_registers_are_and_results_leave_its_scope():
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tile = plgpu.SMEM((64, 64), F16, transforms=tiled)

    def consume(a_ref, b_ref, o_ref):
        def accumulate(sums):
            def multiply(a_tile, b_tile, full):
                plgpu.copy_gmem_to_smem(a_ref, a_tile, full)
                plgpu.copy_gmem_to_smem(b_ref, b_tile, full)
                plgpu.barrier_wait(full)
                plgpu.wgmma(sums, a_tile, b_tile)
                plgpu.wgmma_wait(0)

            pl.run_scoped(multiply, tile, tile, plgpu.Barrier(num_arrivals=2))
            return sums[...]

        o_ref[...] = pl.run_scoped(accumulate, plgpu.ACC((64, 64), F32))

    def produce(a_ref, b_ref, o_ref):
        del a_ref, b_ref, o_ref

    random = np.random.default_rng(0)
    a, b = (random.integers(-4, 4, (64, 64)).astype(np.float16) for _ in range(2))
    programs = [(PRODUCER, produce), (plgpu.Mesh(), consume)]
    expected = a.astype(np.float32) @ b
    check(expected, programs, jax.ShapeDtypeStruct((64, 64), F32), a, b)


def test_threads_of_one_program_share_what_they_allocate(x):
    def consume(x_ref, o_ref):
        me = lax.axis_index("consumer")

        def exchange(shared, written):
            shared[me] = x_ref[me]
            plgpu.barrier_arrive(written)
            plgpu.barrier_wait(written)
            return shared[1 - me]

        o_ref[me] = pl.run_scoped(
            exchange,
            plgpu.SMEM((2, LENGTH), F32),
            plgpu.Barrier(num_arrivals=2),
            collective_axes="consumer",
        )

    check_consumer(x[1::-1], consume, rows(2), x)


def refusal(consume, x):
    kernel = cokernel.mpmd_map([(PRODUCER, do_nothing), (CONSUMER, consume)], rows(2))
    with pytest.raises(NotImplementedError) as error:
        jax.jit(kernel).trace(x).lower(lowering_platforms=("cuda",))
    return str(error.value)


def test_memory_for_each_thread_is_refused_at_its_line(x, line_of):
    def consume(x_ref, o_ref):
        pl.run_scoped(lambda mine: None, plgpu.SMEM((LENGTH,), F32))

    message = refusal(consume, x)
    assert f"memory at {line_of(consume, 'run_scoped')}" in message
    assert "for each of its 2 threads" in message
    assert "collective_axes='consumer'" in message


def test_a_semaphore_is_refused_by_the_interpreter_and_lowered_for_a_gpu(x):
    def produce(x_ref, o_ref, ready):
        pl.semaphore_signal(ready, 2)

    def consume(x_ref, o_ref, ready):
        pl.semaphore_wait(ready)

    def kernel(interpret):
        return cokernel.mpmd_map(
            [(PRODUCER, produce), (CONSUMER, consume)],
            rows(2),
            scratch_types=[plgpu.SemaphoreType.REGULAR],
            interpret=interpret,
        )

    with pytest.raises(NotImplementedError, match="has a semaphore in program produce"):
        kernel(INTERPRET)(x)
    jax.jit(kernel(False)).trace(x).lower(lowering_platforms=("cuda",))


def test_a_block_has_at_most_eight_threads():
    with pytest.raises(ValueError, match=r"have 1 \+ 8 = 9 threads, but a block .* at most 8"):
        cokernel.mpmd_map(
            [
                (PRODUCER, do_nothing),
                (plgpu.Mesh(num_threads=8, thread_name="many"), do_nothing),
            ],
            rows(1),
        )


def test_one_kernel_is_not_for_a_gpu_and_a_cpu():
    with pytest.raises(ValueError, match="only one of them is for a GPU"):
        cokernel.mpmd_map(
            [(PRODUCER, do_nothing), (cokernel.CoreMesh(core=2), do_nothing)], rows(1)
        )


def test_lines_of_the_programs_stay_in_the_merged_one(x, line_of):
    @jax.jit
    def double(value):
        return value * 2

    def consume(x_ref, o_ref):
        @pl.loop(0, 2)
        def _step(step):
            o_ref[step] = double(x_ref[step]) + lax.axis_index("consumer")

    kernel = cokernel.mpmd_map([(PRODUCER, do_nothing), (CONSUMER, consume)], rows(2))
    [eqn] = jax.make_jaxpr(kernel)(x).eqns
    _, merged = gpu_merge.merged(1, eqn.params)

    def lines(jaxpr):
        return {
            (eqn.primitive, _jax.summarize_source(eqn.source_info))
            for eqn in primitive.all_equations(jaxpr)
            if eqn.primitive not in (_jax.jit_p, lax.scan_p)
        }

    assert lines(eqn.params["jaxprs"][1]) <= lines(merged)
    text = {line for _, line in lines(merged)}
    assert any(line.startswith(line_of(consume, "o_ref[step] =")) for line in text)


@pytest.mark.parametrize("transformed", ["jit", "vmap", "scan"])
def test_interpreted_kernels_are_transformed(transformed, x):
    def consume(x_ref, o_ref):
        me = lax.axis_index("consumer")
        o_ref[me] = x_ref[me] + 1

    kernel = cokernel.mpmd_map(
        [(PRODUCER, do_nothing), (CONSUMER, consume)], rows(2), interpret=INTERPRET
    )
    match transformed:
        case "jit":
            np.testing.assert_array_equal(jax.jit(kernel)(x), x[:2] + 1)
        case "vmap":
            both = np.stack([x, 2 * x])
            np.testing.assert_array_equal(jax.vmap(kernel)(both), both[:, :2] + 1)
        case "scan":
            result, _ = lax.scan(lambda c, _: (c.at[:2].set(kernel(c)), None), x, length=3)
            np.testing.assert_array_equal(result, x + np.float32([[3], [3], [0], [0]]))
