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


def subcores(count):
    return plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=count
    )


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
        mesh=subcores(16),
        scratch_types=[pltpu.SMEM((1,), jnp.int32), pltpu.SMEM((1,), jnp.int32)],
        compiler_params=compiler_params,
    )
    out = np.asarray(kernel())
    # Every item was taken by somebody, and each subcore once drew a number that was too high.
    assert np.all((out[:items] >= 0) & (out[:items] < 16))
    assert out[items] == items + 16


def test_a_subcore_waits_until_the_others_have_added_to_its_own_counter(v6e, compiler_params):
    def count(out_ref, done, total):
        subcore = lax.axis_index("subcore")
        done[0] = 0
        plsc.subcore_barrier()

        @pl.when(subcore > 0)
        def _add():
            plsc.fetch_and_add(done.at[0], subcore, subcore_id=0)

        @pl.when(subcore == 0)
        def _watch():
            total[0] = lax.while_loop(lambda seen: seen < 120, lambda _: done[0], jnp.int32(0))
            pltpu.sync_copy(total, out_ref)

    kernel = cokernel.kernel(
        count,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        mesh=subcores(16),
        scratch_types=[pltpu.SMEM((1,), jnp.int32), pltpu.SMEM((1,), jnp.int32)],
        compiler_params=compiler_params,
    )
    np.testing.assert_array_equal(kernel(), [sum(range(16))])
    with cokernel.checked(schedules=20):
        np.testing.assert_array_equal(kernel(), [sum(range(16))])


def test_a_subcore_watches_its_memory_until_a_copy_of_another_one_has_arrived(v6e, compiler_params):
    def send(x_ref, out_ref, buffer, sent, received):
        subcore = lax.axis_index("subcore")
        buffer[...] = jnp.zeros(8, jnp.int32)
        plsc.subcore_barrier()
        copy = pltpu.make_async_remote_copy(
            buffer, buffer, sent, received, device_id={"core": 0, "subcore": 0}
        )

        @pl.when(subcore == 1)
        def _send():
            pltpu.sync_copy(x_ref, buffer)
            copy.start()
            copy.wait_send()

        @pl.when(subcore == 0)
        def _watch():
            lax.while_loop(lambda last: last < 8, lambda _: jnp.max(buffer[...]), jnp.int32(0))
            copy.wait_recv()
            pltpu.sync_copy(buffer, out_ref)

    kernel = cokernel.kernel(
        send,
        jax.ShapeDtypeStruct((8,), jnp.int32),
        mesh=subcores(2),
        scratch_types=[
            pltpu.VMEM((8,), jnp.int32),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=compiler_params,
    )
    x = np.arange(1, 9, dtype=np.int32)
    np.testing.assert_array_equal(kernel(x), x)
    with cokernel.checked(schedules=20):
        np.testing.assert_array_equal(kernel(x), x)
