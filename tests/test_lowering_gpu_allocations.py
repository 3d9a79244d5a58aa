"""Memory that one of several GPU programs allocates in a loop or a branch: it is allocated once.

Each kernel runs in JAX's interpreter, which looks for races; `tests/aot` compiles them to the end.
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
from cokernel.lowering import gpu_allocations, gpu_calls

F32 = jnp.float32
LENGTH = 256
HALF = LENGTH // 2
VECTOR = jax.ShapeDtypeStruct((LENGTH,), F32)
TILE = plgpu.SMEM((LENGTH,), F32)


def produce(x_ref, o_ref, tile, full):
    plgpu.copy_gmem_to_smem(x_ref, tile, full)


def mesh(name, threads=1):
    return plgpu.Mesh(num_threads=threads, thread_name=name)


def kernel(consume, threads=1, *, interpret=True):
    return cokernel.mpmd_map(
        [(mesh("producer"), produce), (mesh("consumer", threads), consume)],
        VECTOR,
        scratch_types=[TILE, plgpu.Barrier()],
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
    )


def scoped(body, *types):
    return pl.run_scoped(body, *types, collective_axes="consumer")


@pytest.fixture
def x():
    return np.random.default_rng(0).integers(-99, 99, LENGTH).astype(np.float32)


def test_a_loop_uses_the_same_memory_each_time(x):
    def consume(x_ref, o_ref, tile, full):
        plgpu.barrier_wait(full)

        @pl.loop(0, 3)
        def _step(step):
            def add(sum_ref):
                sum_ref[...] = tile[...] + step.astype(F32)
                o_ref[...] = sum_ref[...]

            scoped(add, TILE)

    np.testing.assert_array_equal(kernel(consume)(x), x + 2)


def test_branches_and_loops_of_any_depth_are_given_what_they_allocate(x):
    def consume(x_ref, o_ref, tile, full):
        plgpu.barrier_wait(full)

        def in_the_innermost(row, total):
            def add(inner_ref):
                inner_ref[...] = tile[...]
                return jnp.sum(inner_ref[...]) * 0 + total + row.astype(F32)

            return lax.cond(row > 0, lambda: scoped(add, TILE), lambda: total)

        def step(state):
            steps, total = state

            def outer(outer_ref):
                outer_ref[...] = tile[...] * total
                o_ref[...] = outer_ref[...]
                return lax.fori_loop(0, 3, in_the_innermost, total)

            return steps + 1, scoped(outer, TILE)

        # How often it goes round depends on the core, so this is a while loop.
        most = 2 + lax.axis_index("consumer")
        lax.while_loop(lambda state: state[0] < most, step, (0, 1.0))

    # The second step multiplies by 1 + 1 + 2.
    np.testing.assert_array_equal(kernel(consume)(x), x * 4)


def test_each_branch_has_its_own_memory_and_may_have_a_barrier(x):
    def consume(x_ref, o_ref, tile, full):
        plgpu.barrier_wait(full)

        def branch(value):
            def add(sum_ref, filled):
                sum_ref[...] = tile[...] + value
                plgpu.barrier_arrive(filled)
                plgpu.barrier_wait(filled)
                o_ref[...] = sum_ref[...]

            return lambda: scoped(add, TILE, plgpu.Barrier())

        lax.cond(lax.axis_index("consumer") == 0, branch(1.0), branch(2.0))

    np.testing.assert_array_equal(kernel(consume)(x), x + 1)


def exchange(x_ref, o_ref, tile, full):
    """Two threads swap halves through memory that a loop allocates."""
    me = lax.axis_index("consumer")
    mine, other = pl.ds(me * HALF, HALF), pl.ds((1 - me) * HALF, HALF)
    plgpu.barrier_wait(full)

    def with_barrier(written):
        @pl.loop(0, 3)
        def _step(step):
            def swap(both_ref):
                both_ref[mine] = tile[mine] + step.astype(F32)
                plgpu.barrier_arrive(written)
                plgpu.barrier_wait(written)
                # Nothing here keeps the other from the next step's memory, which is this memory.
                o_ref[mine] = both_ref[other]

            scoped(swap, TILE)

    scoped(with_barrier, plgpu.Barrier(num_arrivals=2))


def test_threads_enter_a_loops_memory_when_all_have_left_it(x):
    np.testing.assert_array_equal(kernel(exchange, 2)(x), np.roll(x, HALF) + 2)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_barrier_in_a_loop_is_refused_at_its_line(threads, line_of):
    def consume(x_ref, o_ref, tile, full):
        @pl.loop(0, 2)
        def _step(_):
            scoped(lambda mine: None, plgpu.Barrier())  # allocated

    lowerable = jax.jit(kernel(consume, threads, interpret=False)).trace(VECTOR)
    with pytest.raises(NotImplementedError, match=r"barrier\[\]} in a loop at .* scratch_types"):
        lowerable.lower(lowering_platforms=("cuda",))


def test_a_while_loops_condition_allocates_nothing():
    def consume(x_ref, o_ref, tile, full):
        def small(number):
            return scoped(lambda mine: number < 2 + lax.axis_index("consumer"), TILE)

        lax.while_loop(small, lambda number: number + 1, 0)

    lowerable = jax.jit(kernel(consume, interpret=False)).trace(VECTOR)
    with pytest.raises(NotImplementedError, match="within the condition of a loop at"):
        lowerable.lower(lowering_platforms=("cuda",))


def test_equations_keep_their_lines_and_name_the_memory_they_change(line_of):
    def consume(x_ref, o_ref, tile, full):
        @pl.loop(0, 2)
        def _step(_):
            def fill(own_ref):
                own_ref[...] = tile[...]

            scoped(fill, TILE)

    [eqn] = jax.make_jaxpr(kernel(consume))(jnp.zeros(LENGTH)).eqns
    program = gpu_calls.without_calls(eqn.params["jaxprs"][1])
    hoisted, [_] = gpu_allocations.hoisted(program, eqn.params["meshes"][1])
    [loop] = [eqn for eqn in hoisted.eqns if eqn.primitive is _jax.scan_p]
    inner = loop.params["jaxpr"]
    assert hoisted.invars[-1] in loop.invars
    assert inner.invars[0] in {getattr(effect, "input", None) for effect in inner.effects}
    lines = [_jax.summarize_source(eqn.source_info) for eqn in primitive.all_equations(inner)]
    assert any(line.startswith(line_of(consume, "own_ref[...] =")) for line in lines)
