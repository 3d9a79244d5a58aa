"""Waits that nobody ends, and polling that never sees what it looks for."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.faults.case import case

CORES = 4
REGULAR = pltpu.SemaphoreType.REGULAR
OUT = jax.ShapeDtypeStruct((CORES,), jnp.int32)


def core_id():
    return lax.axis_index("core")


def signal(semaphore, core, amount=1):
    pl.semaphore_signal(semaphore, amount, device_id={"core": core})


def cores(body, *scratch, out=OUT, count=CORES):
    return cokernel.kernel(body, out, mesh=cokernel.CoreMesh(core=count), scratch_types=scratch)


@case("Deadlock", "ready", always=True)
def signal_that_is_never_sent(broken):
    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core
        if not broken:
            signal(ready, (core + 1) % CORES)
        pl.semaphore_wait(ready, 1)  # fault

    return cores(body, REGULAR)


@case("Deadlock", "ready", always=True)
def one_more_waited_for_than_signalled(broken):
    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core
        signal(ready, 0)

        @pl.when(core == 0)
        def _collect():
            pl.semaphore_wait(ready, CORES + 1 if broken else CORES)  # fault

    return cores(body, REGULAR)


@case("Deadlock", "ready", always=True)
def ring_without_a_first_token(broken):
    def body(out_ref, ready):
        core = core_id()
        if not broken:

            @pl.when(core == 0)
            def _start():
                signal(ready, 0)

        pl.semaphore_wait(ready, 1)  # fault
        out_ref[core] = core

        @pl.when(core < CORES - 1)
        def _pass_on():
            signal(ready, core + 1)

    return cores(body, REGULAR)


@case("Deadlock", "mine", always=True)
def two_cores_wait_for_each_other_first(broken):
    def body(out_ref, mine):
        core = core_id()
        out_ref[core] = core
        if not broken:
            signal(mine, 1 - core)
        pl.semaphore_wait(mine, 1)  # fault
        if broken:
            signal(mine, 1 - core)

    return cores(body, REGULAR, out=jax.ShapeDtypeStruct((2,), jnp.int32), count=2)


@case("Deadlock", "barrier", always=True)
def barrier_that_one_core_skips(broken):
    def body(out_ref):
        core = core_id()
        out_ref[core] = core

        @pl.when((core < CORES - 1) | (not broken))
        def _meet():
            plsc.subcore_barrier()  # fault

    return cores(body)


@case("Deadlock", "barrier", always=True)
def barrier_inside_a_loop_of_uneven_length(broken):
    def body(out_ref):
        core = core_id()
        out_ref[core] = core

        def meet(_):
            plsc.subcore_barrier()  # fault

        pl.loop(0, core + 1 if broken else CORES)(meet)

    return cores(body)


@case("Deadlock", "ready", always=True)
def leader_signals_itself_instead_of_the_others(broken):
    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core

        @pl.when(core == 0)
        def _lead():
            for other in range(1, CORES):
                signal(ready, 0 if broken else other)

        @pl.when(core > 0)
        def _follow():
            pl.semaphore_wait(ready, 1)  # fault

    return cores(body, REGULAR)


@case("Deadlock", "ready[0]", always=True)
def signal_of_the_wrong_element(broken):
    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core
        signal(ready.at[1 if broken else 0], (core + 1) % CORES)
        pl.semaphore_wait(ready.at[0], 1)  # fault

    return cores(body, REGULAR((2,)))


@case("Deadlock", "full", always=True)
def consumer_takes_one_item_of_none(broken):
    def produce(x_ref, out_ref, slot, full):
        @pl.loop(0, 0)
        def _item(item):
            slot[0] = x_ref[item]
            pl.semaphore_signal(full, 1, device_id={"consumer": 0})

    def consume(x_ref, out_ref, slot, full):
        out_ref[...] = x_ref[...]

        def take(item):
            pl.semaphore_wait(full, 1)  # fault
            out_ref[item] = slot[0]

        pl.loop(0, 1 if broken else 0)(take)

    producers, consumers = cokernel.CoreMesh(producer=1), cokernel.CoreMesh(consumer=1)
    kernel = cokernel.mpmd_map(
        [(producers, produce), (consumers, consume)],
        OUT,
        scratch_types=[pltpu.HBM((1,), jnp.int32), REGULAR @ consumers],
    )
    return lambda: kernel(jnp.arange(4, dtype=jnp.int32))


@case("Deadlock", "empty", always=True)
def producer_waits_for_credit_in_its_first_round(broken):
    def produce(x_ref, out_ref, slot, full, empty):
        @pl.loop(0, 3)
        def _item(item):
            @pl.when((item > 0) | broken)
            def _credit():
                pl.semaphore_wait(empty, 1)  # fault

            slot[0] = x_ref[item]
            pl.semaphore_signal(full, 1, device_id={"consumer": 0})

        pl.semaphore_wait(empty, 1)

    def consume(x_ref, out_ref, slot, full, empty):
        out_ref[...] = jnp.zeros((CORES,), jnp.int32)

        @pl.loop(0, 3)
        def _item(item):
            pl.semaphore_wait(full, 1)
            out_ref[item] = slot[0]
            pl.semaphore_signal(empty, 1, device_id={"producer": 0})

    producers, consumers = cokernel.CoreMesh(producer=1), cokernel.CoreMesh(consumer=1)
    kernel = cokernel.mpmd_map(
        [(producers, produce), (consumers, consume)],
        OUT,
        scratch_types=[pltpu.HBM((1,), jnp.int32), REGULAR @ consumers, REGULAR @ producers],
    )
    return lambda: kernel(jnp.arange(4, dtype=jnp.int32))


@case("Deadlock", "done", always=True)
def wait_for_a_copy_that_was_started_on_one_branch_only(broken):
    def body(x_ref, out_ref, done):
        core = core_id()
        copy = pltpu.make_async_copy(x_ref.at[core], out_ref.at[core], done)

        @pl.when((core != 2) | (not broken))
        def _start():
            copy.start()

        copy.wait()  # fault

    kernel = cores(body, pltpu.SemaphoreType.DMA, out=jax.ShapeDtypeStruct((4, 8), jnp.int32))
    return lambda: kernel(jnp.arange(32, dtype=jnp.int32).reshape(4, 8))


@case("Deadlock", "done", always=True)
def wait_with_a_window_larger_than_what_was_copied(broken):
    def body(x_ref, out_ref, done):
        core = core_id()
        pltpu.make_async_copy(x_ref.at[core], out_ref.at[core], done).start()
        size = 2 if broken else 1
        window = out_ref.at[pl.ds(0, size)]
        pltpu.make_async_copy(x_ref.at[pl.ds(0, size)], window, done).wait()  # fault

    kernel = cores(body, pltpu.SemaphoreType.DMA, out=jax.ShapeDtypeStruct((4, 8), jnp.int32))
    return lambda: kernel(jnp.arange(32, dtype=jnp.int32).reshape(4, 8))


@case("Deadlock", "go", always=True)
def the_only_one_who_could_signal_has_finished(broken):
    def lead(out_ref, go):
        for core in range(CORES):
            if not broken or core > 0:
                pl.semaphore_signal(go, 1, device_id={"core": core})

    def follow(out_ref, go):
        core = core_id()
        pl.semaphore_wait(go, 1)  # fault
        out_ref[core] = core

    leaders, followers = cokernel.CoreMesh(leader=1), cokernel.CoreMesh(core=CORES)
    return cokernel.mpmd_map(
        [(leaders, lead), (followers, follow)], OUT, scratch_types=[REGULAR @ followers]
    )


@case("Deadlock", "arrived")
def one_of_two_waiters_takes_the_signals_of_both(broken):
    # Both cores wait for the same semaphore of core 0, but only core 0 can.
    def body(out_ref, arrived):
        core = core_id()
        out_ref[core] = core
        signal(arrived, 0)

        @pl.when(core == 0)
        def _collect():
            pl.semaphore_wait(arrived, CORES)
            if broken:
                pl.semaphore_wait(arrived, CORES)  # fault
            for other in range(1, CORES):
                signal(arrived, other)

        @pl.when(core > 0)
        def _go_on():
            pl.semaphore_wait(arrived, 1)

    return cores(body, REGULAR)


@case("Livelock", "seen", always=True)
def polls_for_an_exact_count_that_has_passed(broken):
    def body(out_ref, seen):
        core = core_id()
        out_ref[core] = core
        signal(seen, 0, 2)

        @pl.when(core == 0)
        def _watch():
            wanted = 2 * CORES - 1 if broken else 2 * CORES
            lax.while_loop(
                lambda now: now != wanted,
                lambda _: pl.semaphore_read(seen),  # fault
                jnp.int32(0),
            )
            pl.semaphore_wait(seen, 2 * CORES)

    return cores(body, REGULAR)


@case("Livelock", "flags", always=True)
def polls_a_flag_that_nobody_raises(broken):
    def body(x_ref, out_ref, flags):
        core = core_id()

        @pl.when(core == 0)
        def _lower():
            flags[...] = jnp.zeros((2,), jnp.int32)

        plsc.subcore_barrier()

        @pl.when(core == 1)
        def _raise():
            flags[0 if broken else 1] = x_ref[0]

        @pl.when(core == 0)
        def _watch():
            lax.while_loop(lambda _: flags[1] != x_ref[0], lambda n: n + 1, jnp.int32(0))  # fault

        out_ref[core] = core

    kernel = cores(body, cokernel.shared((2,), jnp.int32))
    return lambda: kernel(jnp.array([123456789]))
