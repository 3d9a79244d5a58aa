"""Asynchronous copies whose source or target is touched too early, or that nobody waits for."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.faults.case import case

DMA = pltpu.SemaphoreType.DMA
REGULAR = pltpu.SemaphoreType.REGULAR
ROWS, WIDTH = 6, 16
X = jnp.arange(ROWS * WIDTH, dtype=jnp.int32).reshape(ROWS, WIDTH)
OUT = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.int32)
WINDOW = cokernel.private((WIDTH,), jnp.int32)
WINDOWS = cokernel.private((2, WIDTH), jnp.int32)


def one_core(body, *scratch, out=OUT, argument=X):
    kernel = cokernel.kernel(body, out, mesh=cokernel.CoreMesh(core=1), scratch_types=scratch)
    return lambda: kernel(argument)


@case("Race", "window")
def target_read_before_the_wait(broken):
    def body(x_ref, out_ref, window, done):
        for row in range(ROWS):
            copy = pltpu.make_async_copy(x_ref.at[row], window, done)
            copy.start()  # fault
            if not broken:
                copy.wait()
            out_ref[row] = window[...] * 2  # fault
            if broken:
                copy.wait()

    return one_core(body, WINDOW, DMA)


@case("Race", "window")
def source_changed_before_it_was_read(broken):
    def body(x_ref, out_ref, window, done):
        for row in range(ROWS):
            window[...] = x_ref[row] + 1  # fault
            copy = pltpu.make_async_copy(window, out_ref.at[row], done)
            copy.start()  # fault
            if not broken:
                copy.wait()
        if broken:
            for _ in range(ROWS):
                copy.wait()

    return one_core(body, WINDOW, DMA)


@case("Race", "window")
def target_written_while_the_copy_runs(broken):
    def body(x_ref, out_ref, window, done):
        copy = pltpu.make_async_copy(x_ref.at[0], window, done)
        copy.start()  # fault
        if not broken:
            copy.wait()
        window[0] = 7  # fault
        if broken:
            copy.wait()
        out_ref[...] = x_ref[...]
        out_ref[0] = window[...]

    return one_core(body, WINDOW, DMA)


@case("Race", "window")
def two_copies_into_one_target(broken):
    def body(x_ref, out_ref, window, done):
        first = pltpu.make_async_copy(x_ref.at[0], window.at[0], done.at[0])
        second = pltpu.make_async_copy(x_ref.at[1], window.at[0 if broken else 1], done.at[1])
        first.start()  # fault
        second.start()  # fault
        first.wait()
        second.wait()
        out_ref[...] = x_ref[...]
        out_ref[0] = window[0]

    return one_core(body, WINDOWS, pltpu.SemaphoreType.DMA((2,)))


@case("Race", "windows")
def both_slots_of_a_double_buffer_are_one(broken):
    def body(x_ref, out_ref, windows, done):
        def fetch(row):
            slot = 0 if broken else row % 2
            return pltpu.make_async_copy(x_ref.at[row], windows.at[slot], done.at[row % 2])

        fetch(0).start()

        @pl.loop(0, ROWS)
        def _step(row):
            @pl.when(row + 1 < ROWS)
            def _prefetch():
                fetch(row + 1).start()  # fault

            fetch(row).wait()
            out_ref[row] = windows[0 if broken else row % 2] + 1  # fault

    return one_core(body, WINDOWS, pltpu.SemaphoreType.DMA((2,)))


@case("Race", "windows")
def waits_for_the_semaphore_of_the_other_slot(broken):
    def body(x_ref, out_ref, windows, done):
        def fetch(row, semaphore):
            return pltpu.make_async_copy(x_ref.at[row], windows.at[row % 2], done.at[semaphore])

        for row in range(0, ROWS, 2):
            fetch(row, 0).start()  # fault
            fetch(row + 1, 1).start()
            fetch(row, 1 if broken else 0).wait()
            out_ref[row] = windows[0]  # fault
            fetch(row + 1, 0 if broken else 1).wait()
            out_ref[row + 1] = windows[1]

    return one_core(body, WINDOWS, pltpu.SemaphoreType.DMA((2,)))


@case("Race", "windows")
def one_semaphore_for_two_copies_waited_for_one_by_one(broken):
    # Either copy may be the first to finish, so one wait says nothing of this one.
    def body(x_ref, out_ref, windows, done):
        first = pltpu.make_async_copy(x_ref.at[0], windows.at[0], done)
        second = pltpu.make_async_copy(x_ref.at[1], windows.at[1], done)
        first.start()  # fault
        second.start()
        first.wait()
        if not broken:
            second.wait()
        out_ref[...] = x_ref[...]
        out_ref[0] = windows[0]  # fault
        if broken:
            second.wait()

    return one_core(body, WINDOWS, DMA)


@case("Race", "ids")
def indices_overwritten_while_the_gather_runs(broken):
    def body(x_ref, out_ref, ids, rows, done):
        for number in range(3):
            ids[...] = (lax.iota(jnp.int32, 4) + number) % ROWS  # fault
            gather = pltpu.make_async_copy(x_ref.at[ids], rows.at[number], done)
            gather.start()  # fault
            if not broken:
                gather.wait()
        if broken:
            for _ in range(3):
                gather.wait()
        out_ref[...] = x_ref[...]
        out_ref[pl.ds(0, 4)] = rows[0] + rows[1] + rows[2]

    ids = cokernel.private((4,), jnp.int32)
    return one_core(body, ids, cokernel.private((3, 4, WIDTH), jnp.int32), DMA)


@case("Race", "out_ref")
def scatters_meet_in_one_row(broken):
    def body(x_ref, out_ref, ids, rows, done):
        pltpu.sync_copy(x_ref, out_ref)
        pltpu.sync_copy(x_ref.at[pl.ds(0, 4)], rows)
        ids[0] = lax.iota(jnp.int32, 2)
        ids[1] = lax.iota(jnp.int32, 2) + (1 if broken else 2)
        copies = [
            pltpu.make_async_copy(
                rows.at[pl.ds(2 * number, 2)], out_ref.at[ids.at[number]], done.at[number]
            )
            for number in range(2)
        ]
        for copy in copies:
            copy.start()  # fault
        for copy in copies:
            copy.wait()

    ids = cokernel.private((2, 2), jnp.int32)
    rows = cokernel.private((4, WIDTH), jnp.int32)
    return one_core(body, ids, rows, pltpu.SemaphoreType.DMA((2,)))


@case("Race", "out_ref[2, 0:16]", always=True)
def scatter_with_a_row_that_comes_twice(broken):
    def body(x_ref, out_ref, ids, rows, done):
        pltpu.sync_copy(x_ref, out_ref)
        pltpu.sync_copy(x_ref.at[pl.ds(0, 4)], rows)
        ids[...] = lax.iota(jnp.int32, 4)
        if broken:
            ids[3] = 2
        pltpu.async_copy(rows, out_ref.at[ids], done).wait()  # fault

    ids = cokernel.private((4,), jnp.int32)
    return one_core(body, ids, cokernel.private((4, WIDTH), jnp.int32), DMA)


@case("Race", "middle")
def second_leg_started_before_the_first_has_arrived(broken):
    def body(x_ref, out_ref, middle, done):
        first = pltpu.make_async_copy(x_ref, middle, done.at[0])
        second = pltpu.make_async_copy(middle, out_ref, done.at[1])
        first.start()  # fault
        if not broken:
            first.wait()
        second.start()  # fault
        if broken:
            first.wait()
        second.wait()

    middle = pltpu.HBM((ROWS, WIDTH), jnp.int32)
    return one_core(body, middle, pltpu.SemaphoreType.DMA((2,)))


@case("UnwaitedCopy", "done", always=True)
def copy_that_nobody_waits_for(broken):
    def body(x_ref, out_ref, done):
        copy = pltpu.make_async_copy(x_ref, out_ref, done)
        copy.start()  # fault
        if not broken:
            copy.wait()

    return one_core(body, DMA)


@case("UnwaitedCopy", "done", always=True)
def one_wait_for_two_copies(broken):
    def body(x_ref, out_ref, done):
        half = ROWS // 2
        for number in range(2):
            part = pl.ds(number * half, half)
            copy = pltpu.make_async_copy(x_ref.at[part], out_ref.at[part], done)
            copy.start()  # fault
        copy.wait()
        if not broken:
            copy.wait()

    return one_core(body, DMA)


@case("UnwaitedCopy", "done", always=True)
def last_prefetch_is_never_waited_for(broken):
    def body(x_ref, out_ref, windows, done):
        def fetch(row):
            return pltpu.make_async_copy(
                x_ref.at[row % ROWS], windows.at[row % 2], done.at[row % 2]
            )

        fetch(0).start()

        @pl.loop(0, ROWS)
        def _step(row):
            @pl.when(broken | (row + 1 < ROWS))
            def _prefetch():
                fetch(row + 1).start()  # fault

            fetch(row).wait()
            out_ref[row] = windows[row % 2]

    return one_core(body, WINDOWS, pltpu.SemaphoreType.DMA((2,)))


@case("CopyInFlight", "window")
def scope_ends_before_its_copy(broken):
    def body(x_ref, out_ref, done):
        def scope(window):
            window[...] = x_ref[0] + 1
            copy = pltpu.make_async_copy(window, out_ref.at[0], done)
            copy.start()  # fault
            if not broken:
                copy.wait()

        out_ref[...] = x_ref[...]
        pl.run_scoped(scope, WINDOW)
        if broken:
            pltpu.make_async_copy(x_ref.at[0], out_ref.at[0], done).wait()

    return one_core(body, DMA)


@case("WaitTooLarge", "done")
def waits_for_more_than_the_copy_moved(broken):
    # A second copy on the semaphore makes up for the difference, so nothing hangs.
    def body(x_ref, out_ref, done):
        half = ROWS // 2
        parts = [pl.ds(0, half), pl.ds(half, half)]
        copies = [pltpu.make_async_copy(x_ref.at[part], out_ref.at[part], done) for part in parts]
        copies[0].start()
        copies[1].start()
        if broken:
            for size in (half + 1, half - 1):
                window = out_ref.at[pl.ds(0, size)]
                pltpu.make_async_copy(x_ref.at[pl.ds(0, size)], window, done).wait()  # fault
        else:
            copies[0].wait()
            copies[1].wait()

    return one_core(body, DMA)


def pair(body, *scratch):
    """Two cores, each of which has a row of X and gives one."""
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2, WIDTH), jnp.int32),
        mesh=cokernel.CoreMesh(core=2),
        scratch_types=scratch,
    )
    return lambda: kernel(X[:2])


@case("Race", "inbox")
def received_data_read_before_it_has_arrived(broken):
    def body(x_ref, out_ref, outbox, inbox, sent, received):
        core = lax.axis_index("core")
        outbox[...] = x_ref[core]
        copy = pltpu.make_async_remote_copy(
            outbox, inbox, sent, received, device_id={"core": 1 - core}
        )
        copy.start()  # fault
        copy.wait_send()
        if not broken:
            copy.wait_recv()
        out_ref[core] = inbox[...]  # fault
        if broken:
            copy.wait_recv()

    return pair(body, WINDOW, WINDOW, DMA, DMA)


@case("Race", "outbox")
def sent_data_changed_before_it_has_left(broken):
    def body(x_ref, out_ref, outbox, inbox, sent, received):
        core = lax.axis_index("core")
        outbox[...] = x_ref[core]
        copy = pltpu.make_async_remote_copy(
            outbox, inbox, sent, received, device_id={"core": 1 - core}
        )
        copy.start()  # fault
        if not broken:
            copy.wait_send()
        outbox[...] = x_ref[core] * 0  # fault
        copy.wait_recv()
        if broken:
            copy.wait_send()
        out_ref[core] = inbox[...]

    return pair(body, WINDOW, WINDOW, DMA, DMA)


@case("Race", "inbox")
def sends_into_a_buffer_that_its_owner_still_reads(broken):
    def body(x_ref, out_ref, outbox, inbox, sent, received, free):
        core = lax.axis_index("core")
        out_ref[core] = jnp.zeros((WIDTH,), jnp.int32)
        for number in range(3):
            outbox[...] = x_ref[core] + number
            if not broken and number > 0:
                pl.semaphore_wait(free, 1)
            copy = pltpu.make_async_remote_copy(
                outbox, inbox, sent, received, device_id={"core": 1 - core}
            )
            copy.start()  # fault
            copy.wait()
            out_ref[core] += inbox[...]  # fault
            if not broken and number < 2:
                pl.semaphore_signal(free, 1, device_id={"core": 1 - core})

    return pair(body, WINDOW, WINDOW, DMA, DMA, REGULAR)


@case("Race", "table")
def gather_from_rows_that_another_core_is_filling(broken):
    def body(x_ref, out_ref, table, ids, rows, filled, done):
        core = lax.axis_index("core")
        table[core] = x_ref[core]  # fault
        pl.semaphore_signal(filled, 1, device_id={"core": 1 - core})
        if not broken:
            pl.semaphore_wait(filled, 1)
        ids[...] = 1 - lax.iota(jnp.int32, 2)
        gather = pltpu.make_async_copy(table.at[ids], rows, done)
        gather.start()  # fault
        gather.wait()
        out_ref[core] = rows[core]
        if broken:
            pl.semaphore_wait(filled, 1)

    return pair(
        body,
        cokernel.shared((2, WIDTH), jnp.int32),
        cokernel.private((2,), jnp.int32),
        cokernel.private((2, WIDTH), jnp.int32),
        REGULAR,
        DMA,
    )


@case("Race", "sums", chip="tpu7x")
def adding_copies_meet_a_plain_one(broken):
    def body(x_ref, out_ref, sums, rows, ids, done):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        pltpu.sync_copy(x_ref, rows)
        ids[...] = lax.iota(jnp.int32, 16)
        if broken:
            pltpu.sync_copy(rows.at[subcore], sums.at[subcore])  # fault
        else:

            @pl.when(subcore == 0)
            def _clear():
                pltpu.sync_copy(rows, sums)

            plsc.subcore_barrier()
        pltpu.async_copy(rows, sums.at[ids], done, add=True).wait()  # fault
        plsc.subcore_barrier()
        pltpu.sync_copy(sums.at[subcore], out_ref.at[core, subcore])

    def mesh():
        return plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2, 16, 16), jnp.int32),
        mesh=mesh(),
        scratch_types=[
            pltpu.VMEM_SHARED((16, 16), jnp.int32),
            pltpu.VMEM((16, 16), jnp.int32),
            pltpu.VMEM((16,), jnp.int32),
            DMA,
        ],
    )
    return lambda: kernel(jnp.arange(256, dtype=jnp.int32).reshape(16, 16))
