"""Semaphores that do not count zero where they should."""

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


def cores(body, *scratch, out=OUT):
    return cokernel.kernel(body, out, mesh=cokernel.CoreMesh(core=CORES), scratch_types=scratch)


@case("LeftoverSemaphore", "ready", always=True)
def one_more_signalled_than_waited_for(broken):
    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core
        signal(ready, (core + 1) % CORES, 2 if broken else 1)  # fault
        pl.semaphore_wait(ready, 1)

    return cores(body, REGULAR)


@case("LeftoverSemaphore", "ready", always=True)
def waits_for_exactly_n_after_n_and_one_signals(broken):
    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core
        signal(ready, 0)  # fault

        @pl.when(core == 0)
        def _collect():
            if not broken:
                pl.semaphore_wait(ready, 1)
            pl.semaphore_wait(ready, CORES - 1)

    return cores(body, REGULAR)


@case("LeftoverSemaphore", "empty", always=True)
def last_credits_of_a_ring_are_not_taken(broken):
    length, depth = 5, 2

    def produce(x_ref, out_ref, slots, full, empty):
        @pl.loop(0, length)
        def _item(item):
            @pl.when(item >= depth)
            def _credit():
                pl.semaphore_wait(empty, 1)

            slots[item % depth] = x_ref[item]
            pl.semaphore_signal(full, 1, device_id={"consumer": 0})

        if not broken:
            pl.semaphore_wait(empty, depth)

    def consume(x_ref, out_ref, slots, full, empty):
        @pl.loop(0, length)
        def _item(item):
            pl.semaphore_wait(full, 1)
            out_ref[item] = slots[item % depth]
            pl.semaphore_signal(empty, 1, device_id={"producer": 0})  # fault

    producers, consumers = cokernel.CoreMesh(producer=1), cokernel.CoreMesh(consumer=1)
    kernel = cokernel.mpmd_map(
        [(producers, produce), (consumers, consume)],
        jax.ShapeDtypeStruct((length,), jnp.int32),
        scratch_types=[pltpu.HBM((depth,), jnp.int32), REGULAR @ consumers, REGULAR @ producers],
    )
    return lambda: kernel(jnp.arange(length, dtype=jnp.int32))


@case("LeftoverSemaphore", "ready", always=True)
def wait_only_on_one_of_two_branches(broken):
    def body(x_ref, out_ref, ready):
        core = core_id()
        out_ref[core] = core
        signal(ready, (core + 1) % CORES)  # fault

        @pl.when((x_ref[core] > 1) | (not broken))
        def _wait():
            pl.semaphore_wait(ready, 1)

    kernel = cores(body, REGULAR)
    return lambda: kernel(jnp.arange(CORES, dtype=jnp.int32))


@case("LeftoverSemaphore", "ready", always=True)
def loop_left_early_with_signals_outstanding(broken):
    def body(x_ref, out_ref, ready):
        core = core_id()
        for _ in range(4):
            signal(ready, core)  # fault

        def step(item):
            pl.semaphore_wait(ready, 1)
            return item + 1

        stop = 3 if broken else 4
        out_ref[core] = lax.while_loop(lambda item: item < stop, step, jnp.int32(0))

    kernel = cores(body, REGULAR)
    return lambda: kernel(jnp.arange(CORES, dtype=jnp.int32))


@case("LeftoverSemaphore", "inner", always=True)
def semaphore_of_a_scope_left_over(broken):
    def body(out_ref):
        core = core_id()

        def scope(inner):
            pl.semaphore_signal(inner, 3)  # fault
            pl.semaphore_wait(inner, 2 if broken else 3)

        pl.run_scoped(scope, REGULAR)
        out_ref[core] = core

    return cores(body)


@case("LeftoverSemaphore", "ready", always=True)
def looked_at_but_not_taken(broken):
    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core
        signal(ready, (core + 1) % CORES)  # fault
        lax.while_loop(lambda n: n < 1, lambda _: pl.semaphore_read(ready), jnp.int32(0))
        if not broken:
            pl.semaphore_wait(ready, 1)

    return cores(body, REGULAR)


@case("LeftoverSemaphore", "ready", always=True)
def every_core_signals_but_only_the_first_takes(broken):
    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core
        for other in range(CORES):
            signal(ready, other)  # fault
        if broken:

            @pl.when(core == 0)
            def _take():
                pl.semaphore_wait(ready, CORES)
        else:
            pl.semaphore_wait(ready, CORES)

    return cores(body, REGULAR)


@case("LeftoverSemaphore", "ready", always=True)
def trip_count_of_one_needs_no_second_signal(broken):
    trips = 1

    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core
        pl.semaphore_signal(ready, 1)

        @pl.loop(0, trips)
        def _trip(trip):
            pl.semaphore_wait(ready, 1)

            @pl.when((trip + 1 < trips) | broken)
            def _next():
                pl.semaphore_signal(ready, 1)  # fault

    return cores(body, REGULAR)


@case("LeftoverSemaphore", "barrier_semaphore", always=True, chip="tpu7x")
def barrier_semaphore_left_over(broken):
    def body(out_ref, row):
        core, subcore = core_id(), lax.axis_index("subcore")
        barrier = pltpu.get_barrier_semaphore()
        there = {"core": core, "subcore": (subcore + 1) % 16}
        pl.semaphore_signal(barrier, 2 if broken else 1, device_id=there)  # fault
        pl.semaphore_wait(barrier, 1)
        row[...] = lax.iota(jnp.int32, 16) + subcore
        pltpu.sync_copy(row, out_ref.at[core, subcore])

    return cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2, 16, 16), jnp.int32),
        mesh=plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore"),
        scratch_types=[pltpu.VMEM((16,), jnp.int32)],
        compiler_params=pltpu.CompilerParams(collective_id=0),
    )


@case("SemaphoreUnderflow", "ready", always=True)
def takes_back_more_than_was_signalled(broken):
    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core
        signal(ready, core, 2)
        if broken:
            signal(ready, core, -3)  # fault
        pl.semaphore_wait(ready, 2)

    return cores(body, REGULAR)


@case("SemaphoreOverflow", "ready", always=True)
def counts_beyond_what_a_semaphore_holds(broken):
    def body(out_ref, ready):
        core = core_id()
        out_ref[core] = core
        most = jnp.iinfo(jnp.int32).max
        pl.semaphore_signal(ready, most)
        if not broken:
            pl.semaphore_wait(ready, most)
        pl.semaphore_signal(ready, 1)  # fault
        pl.semaphore_wait(ready, 1)
        if broken:
            pl.semaphore_wait(ready, most)

    return cores(body, REGULAR)
