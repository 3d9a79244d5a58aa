"""Cores that look again and again until another core has done something.

With one worker such a loop must let the other core run, or it never ends.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

CORES = 6


def test_a_semaphore_is_read_until_it_counts_enough(compiler_params):
    def look(out_ref, seen):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _watch():
            def looks_again(last):
                return last < CORES - 1

            def look_again(last):
                now = pl.semaphore_read(seen)
                # A count never falls while nobody waits.
                out_ref[1] = jnp.where(now < last, 1, out_ref[1])
                return now

            out_ref[1] = 0
            out_ref[0] = lax.while_loop(looks_again, look_again, jnp.int32(0))
            pl.semaphore_wait(seen, CORES - 1)

        @pl.when(core > 0)
        def _signal():
            pl.semaphore_signal(seen, 1, device_id={"core": 0})

    kernel = cokernel.kernel(
        look,
        jax.ShapeDtypeStruct((2,), jnp.int32),
        mesh=cokernel.CoreMesh(core=CORES),
        scratch_types=[pltpu.SemaphoreType.REGULAR],
        compiler_params=compiler_params,
    )
    np.testing.assert_array_equal(kernel(), [CORES - 1, 0])


def test_a_flag_in_shared_memory_is_read_until_it_is_raised(compiler_params):
    def hand_on(x_ref, out_ref, flags, cleared):
        core = lax.axis_index("core")
        # The flags hold whatever was there before, so nobody looks until all of them are down.
        flags[core] = 0
        for other in range(CORES):
            pl.semaphore_signal(cleared, 1, device_id={"core": other})
        pl.semaphore_wait(cleared, CORES)

        @pl.when(core == 0)
        def _clear():
            for other in range(CORES):
                out_ref[other] = 0

        # A chain from the last core to the first: each waits for the flag of the one behind it.
        @pl.when(core < CORES - 1)
        def _wait():
            lax.while_loop(lambda _: flags[core + 1] != x_ref[0], lambda n: n + 1, jnp.int32(0))

        flags[core] = x_ref[0]

        @pl.when(core == 0)
        def _end():
            out_ref[0] = flags[CORES - 1]

    kernel = cokernel.kernel(
        hand_on,
        jax.ShapeDtypeStruct((CORES,), jnp.int32),
        mesh=cokernel.CoreMesh(core=CORES),
        scratch_types=[cokernel.shared((CORES,), jnp.int32), pltpu.SemaphoreType.REGULAR],
        compiler_params=compiler_params,
    )
    # A number of its own for each launch tells its flags from those of the one before.
    for number in (123_456_789, 987_654_321):
        result = kernel(np.array([number], np.int32))
        np.testing.assert_array_equal(result, [number] + [0] * (CORES - 1))


def test_vector_subcores_draw_numbers_from_one_counter(v6e, compiler_params):
    mesh = plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=16
    )
    items = 100

    def draw(out_ref, counter, drawn):
        subcore = lax.axis_index("subcore")
        counter[0] = 0
        plsc.subcore_barrier()

        def work(item):
            drawn[0] = subcore
            pltpu.sync_copy(drawn, out_ref.at[pl.ds(item, 1)])
            return plsc.fetch_and_add(counter.at[0], 1, subcore_id=0)

        first = plsc.fetch_and_add(counter.at[0], 1, subcore_id=0)
        lax.while_loop(lambda item: item < items, work, first)
        plsc.subcore_barrier()

        @pl.when(subcore == 0)
        def _total():
            pltpu.sync_copy(counter, out_ref.at[pl.ds(items, 1)])

    kernel = cokernel.kernel(
        draw,
        jax.ShapeDtypeStruct((items + 1,), jnp.int32),
        mesh=mesh,
        scratch_types=[pltpu.SMEM((1,), jnp.int32), pltpu.SMEM((1,), jnp.int32)],
        compiler_params=compiler_params,
    )
    out = np.asarray(kernel())
    # Every item was taken by somebody, and each subcore once drew a number that was too high.
    assert np.all((out[:items] >= 0) & (out[:items] < 16))
    assert out[items] == items + 16
