"""Cores that touch the same elements in no order."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.faults.case import case

CORES = 4
SEMAPHORE = pltpu.SemaphoreType.REGULAR
OUT = jax.ShapeDtypeStruct((CORES, 8), jnp.int32)
BOARD = cokernel.shared((CORES, 8), jnp.int32)


def cores(count=CORES):
    return cokernel.CoreMesh(core=count)


def core_id():
    return lax.axis_index("core")


def signal(semaphore, core, amount=1):
    pl.semaphore_signal(semaphore, amount, device_id={"core": core})


@case("Race", "board")
def neighbour_read_without_a_barrier(broken):
    def body(out_ref, board):
        core = core_id()
        board[core] = jnp.full((8,), core)  # fault
        if not broken:
            plsc.subcore_barrier()
        out_ref[core] = board[(core + 1) % CORES]  # fault

    return cokernel.kernel(body, OUT, mesh=cores(), scratch_types=[BOARD])


@case("Race", "board")
def missing_barrier_between_reading_and_the_next_write(broken):
    def body(out_ref, board):
        core = core_id()
        for number in range(3):
            board[core] = jnp.full((8,), core + number)  # fault
            plsc.subcore_barrier()
            out_ref[core] = board[(core + 1) % CORES]  # fault
            if not broken:
                plsc.subcore_barrier()

    return cokernel.kernel(body, OUT, mesh=cores(), scratch_types=[BOARD])


@case("Race", "total")
def two_cores_add_without_atomics(broken):
    def body(out_ref, total, turn):
        core = core_id()

        @pl.when(core == 0)
        def _clear():
            total[...] = jnp.zeros((8,), jnp.int32)

        plsc.subcore_barrier()
        if not broken:

            @pl.when(core > 0)
            def _my_turn():
                pl.semaphore_wait(turn, 1)

        total[...] += 1  # fault
        if not broken:

            @pl.when(core < CORES - 1)
            def _next_turn():
                signal(turn, core + 1)

        plsc.subcore_barrier()
        out_ref[core] = total[...]

    return cokernel.kernel(
        body, OUT, mesh=cores(), scratch_types=[cokernel.shared((8,), jnp.int32), SEMAPHORE]
    )


def ring(depth, ahead, length=6):
    """A producer and a consumer with `depth` slots, where the producer may run `ahead`."""

    def produce(x_ref, out_ref, slots, full, empty):
        @pl.loop(0, length)
        def _item(item):
            @pl.when(item >= ahead)
            def _wait():
                pl.semaphore_wait(empty, 1)

            slots[item % depth] = x_ref[item]  # fault
            pl.semaphore_signal(full, 1, device_id={"consumer": 0})

        pl.semaphore_wait(empty, min(ahead, length))

    def consume(x_ref, out_ref, slots, full, empty):
        @pl.loop(0, length)
        def _item(item):
            pl.semaphore_wait(full, 1)
            out_ref[item] = slots[item % depth]  # fault
            pl.semaphore_signal(empty, 1, device_id={"producer": 0})

    producers, consumers = cokernel.CoreMesh(producer=1), cokernel.CoreMesh(consumer=1)
    kernel = cokernel.mpmd_map(
        [(producers, produce), (consumers, consume)],
        jax.ShapeDtypeStruct((length, 8), jnp.int32),
        scratch_types=[
            pltpu.HBM((depth, 8), jnp.int32),
            SEMAPHORE @ consumers,
            SEMAPHORE @ producers,
        ],
    )
    return lambda: kernel(jnp.arange(length * 8).reshape(length, 8))


@case("Race", "slots", lines=ring)
def ring_depth_off_by_one(broken):
    return ring(depth=2, ahead=3 if broken else 2)


@case("Race", "slots", lines=ring)
def consumer_lapped_by_a_producer_that_never_waits(broken):
    return ring(depth=3, ahead=6 if broken else 3)


@case("Race", "board")
def signal_before_the_write_it_announces(broken):
    def body(out_ref, board, ready):
        core = core_id()
        if broken:
            signal(ready, (core + 1) % CORES)
        board[core] = jnp.full((8,), core)  # fault
        if not broken:
            signal(ready, (core + 1) % CORES)
        pl.semaphore_wait(ready, 1)
        out_ref[core] = board[(core + CORES - 1) % CORES]  # fault

    return cokernel.kernel(body, OUT, mesh=cores(), scratch_types=[BOARD, SEMAPHORE])


@case("Race", "board")
def wait_after_the_read_it_should_guard(broken):
    def body(out_ref, board, ready):
        core = core_id()
        board[core] = jnp.full((8,), core)  # fault
        signal(ready, (core + 1) % CORES)
        if not broken:
            pl.semaphore_wait(ready, 1)
        out_ref[core] = board[(core + CORES - 1) % CORES]  # fault
        if broken:
            pl.semaphore_wait(ready, 1)

    return cokernel.kernel(body, OUT, mesh=cores(), scratch_types=[BOARD, SEMAPHORE])


@case("Race", "out_ref")
def output_windows_overlap_by_one_row(broken):
    rows = 3 if broken else 2

    def body(out_ref):
        core = core_id()
        first = jnp.minimum(core * 2, CORES * 2 - rows)
        out_ref[pl.ds(first, rows)] = jnp.full((rows, 8), core)  # fault

    out = jax.ShapeDtypeStruct((CORES * 2, 8), jnp.int32)
    return cokernel.kernel(body, out, mesh=cores())


@case("Race", "out_ref")
def every_core_writes_the_summary(broken):
    def body(out_ref):
        core = core_id()

        def write():
            out_ref[0] = jnp.full((8,), 7)  # fault

        if broken:
            write()
        else:
            pl.when(core == 0)(write)

    return cokernel.kernel(body, jax.ShapeDtypeStruct((1, 8), jnp.int32), mesh=cores())


@case("Race", "board")
def semaphore_reused_across_phases(broken):
    # A fast core's signal of the second phase is taken for a slow core's of the first.
    def body(out_ref, board, arrived):
        core = core_id()
        for phase in range(2):
            slot = 0 if broken else phase
            board[phase, core] = jnp.full((8,), core + phase)  # fault
            signal(arrived.at[slot], 0)

        @pl.when(core == 0)
        def _collect():
            for phase in range(2):
                pl.semaphore_wait(arrived.at[0 if broken else phase], CORES)
                for other in range(CORES):
                    out_ref[other] = board[phase, other]  # fault

    return cokernel.kernel(
        body,
        OUT,
        mesh=cores(),
        scratch_types=[cokernel.shared((2, CORES, 8), jnp.int32), SEMAPHORE((2,))],
    )


@case("Race", "board")
def collector_waits_for_one_worker_too_few(broken):
    def body(out_ref, board, arrived):
        core = core_id()
        board[core] = jnp.full((8,), core)  # fault
        signal(arrived, 0)

        @pl.when(core == 0)
        def _collect():
            pl.semaphore_wait(arrived, CORES - 1 if broken else CORES)
            for other in range(CORES):
                out_ref[other] = board[other]  # fault
            if broken:
                pl.semaphore_wait(arrived, 1)

    return cokernel.kernel(body, OUT, mesh=cores(), scratch_types=[BOARD, SEMAPHORE])


@case("Race", "grid")
def stencil_updated_in_place(broken):
    def body(out_ref, grid, next_grid):
        core = core_id()
        grid[core] = jnp.full((8,), core)
        plsc.subcore_barrier()
        left, right = (core + CORES - 1) % CORES, (core + 1) % CORES
        smoothed = grid[left] + grid[right]  # fault
        if broken:
            grid[core] = smoothed  # fault
            plsc.subcore_barrier()
            out_ref[core] = grid[core]
        else:
            next_grid[core] = smoothed
            out_ref[core] = next_grid[core]

    return cokernel.kernel(body, OUT, mesh=cores(), scratch_types=[BOARD, BOARD])


@case("Race", "partial")
def tree_reduction_without_waiting_for_the_second_level(broken):
    def body(out_ref, partial, ready):
        core = core_id()
        partial[core] = jnp.full((8,), core)
        for level, distance in enumerate((1, 2)):
            sends = core % (2 * distance) == distance

            @pl.when(sends)
            def _send(distance=distance, level=level):
                signal(ready.at[level], core - distance)

            @pl.when(core % (2 * distance) == 0)
            def _receive(distance=distance, level=level):
                if not (broken and level == 1):
                    pl.semaphore_wait(ready.at[level], 1)
                partial[core] = partial[core] + partial[core + distance]  # fault
                if broken and level == 1:
                    pl.semaphore_wait(ready.at[level], 1)

        @pl.when(core == 0)
        def _out():
            out_ref[...] = partial[0]

    out = jax.ShapeDtypeStruct((8,), jnp.int32)
    return cokernel.kernel(body, out, mesh=cores(), scratch_types=[BOARD, SEMAPHORE((2,))])


@case("Race", "flag_and_data")
def flag_raised_before_the_data_is_there(broken):
    # Polling of a flag is how memory is watched; what it guards must be written before it.
    def body(x_ref, out_ref, flag_and_data):
        core = core_id()

        @pl.when(core == 0)
        def _lower():
            flag_and_data[0] = 0

        plsc.subcore_barrier()

        @pl.when(core == 0)
        def _write():
            if broken:
                flag_and_data[0] = x_ref[0]
            flag_and_data[1] = x_ref[0] * 2  # fault
            if not broken:
                flag_and_data[0] = x_ref[0]

        @pl.when(core == 1)
        def _watch():
            lax.while_loop(lambda _: flag_and_data[0] != x_ref[0], lambda n: n + 1, jnp.int32(0))
            out_ref[0] = flag_and_data[1]  # fault

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        mesh=cores(2),
        scratch_types=[cokernel.shared((2,), jnp.int32)],
    )
    return lambda: kernel(jnp.array([1234567]))


@case("Race", "data")
def flag_raised_too_early_and_once_more_in_time(broken):
    # Only who looks between the two stores to the flag comes too early.
    def body(x_ref, out_ref, flag, data, ready):
        core = core_id()

        @pl.when(core == 0)
        def _lower():
            flag[0] = 0
            for other in range(2):
                pl.semaphore_signal(ready, 1, device_id={"core": other})

        pl.semaphore_wait(ready, 1)

        @pl.when(core == 1)
        def _write():
            if broken:
                flag[0] = 1
            data[0] = x_ref[0]  # fault
            flag[0] = 2

        @pl.when(core == 0)
        def _watch():
            lax.while_loop(lambda seen: seen < 1, lambda _: flag[0], jnp.int32(0))
            out_ref[0] = data[0]  # fault

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        mesh=cores(2),
        scratch_types=[
            cokernel.shared((1,), jnp.int32),
            cokernel.shared((1,), jnp.int32),
            pltpu.SemaphoreType.REGULAR,
        ],
    )
    return lambda: kernel(jnp.array([1234567]))


def subcores():
    return plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")


@case("Race", "table", chip="tpu7x")
def subcores_copy_into_one_row_of_shared_memory(broken):
    def body(x_ref, out_ref, table, row):
        core, subcore = core_id(), lax.axis_index("subcore")
        pltpu.sync_copy(x_ref.at[subcore], row)
        mine = subcore // 2 if broken else subcore
        pltpu.sync_copy(row, table.at[mine])  # fault
        plsc.subcore_barrier()
        pltpu.sync_copy(table.at[mine], row)
        pltpu.sync_copy(row, out_ref.at[core, subcore])

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2, 16, 16), jnp.int32),
        mesh=subcores(),
        scratch_types=[pltpu.VMEM_SHARED((16, 16), jnp.int32), pltpu.VMEM((16,), jnp.int32)],
    )
    return lambda: kernel(jnp.arange(256).reshape(16, 16))


@case("Race", "sums", chip="tpu7x")
def shared_sums_read_while_others_still_add(broken):
    def body(x_ref, out_ref, sums, rows, ids, done):
        core, subcore = core_id(), lax.axis_index("subcore")
        pltpu.sync_copy(x_ref, rows)
        ids[...] = lax.iota(jnp.int32, 16)

        @pl.when(subcore == 0)
        def _clear():
            pltpu.sync_copy(rows, sums)

        plsc.subcore_barrier()
        pltpu.async_copy(rows, sums.at[ids], done, add=True).wait()  # fault
        if not broken:
            plsc.subcore_barrier()
        pltpu.sync_copy(sums.at[subcore], rows.at[0])  # fault
        pltpu.sync_copy(rows.at[0], out_ref.at[core, subcore])

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2, 16, 16), jnp.int32),
        mesh=subcores(),
        scratch_types=[
            pltpu.VMEM_SHARED((16, 16), jnp.int32),
            pltpu.VMEM((16, 16), jnp.int32),
            pltpu.VMEM((16,), jnp.int32),
            pltpu.SemaphoreType.DMA,
        ],
    )
    return lambda: kernel(jnp.arange(256).reshape(16, 16))


@case("Race", "staged", chip="tpu7x")
def scalar_subcore_refills_what_vector_subcores_still_read(broken):
    rounds = 3

    def stage(x_ref, out_ref, staged, row, filled, taken):
        core = core_id()
        for number in range(rounds):
            pltpu.sync_copy(x_ref.at[number], staged)  # fault
            for subcore in range(16):
                pl.semaphore_signal(filled, 1, device_id={"core": core, "subcore": subcore})
            if not broken or number == rounds - 1:
                pl.semaphore_wait(taken, 16 * (rounds if broken else 1))

    def take(x_ref, out_ref, staged, row, filled, taken):
        core, subcore = core_id(), lax.axis_index("subcore")
        for _ in range(rounds):
            pl.semaphore_wait(filled, 1)
            pltpu.sync_copy(staged, row)  # fault
            pl.semaphore_signal(taken, 1, device_id={"core": core})
        pltpu.sync_copy(row, out_ref.at[core, subcore])

    def build():
        scalar, vector = plsc.ScalarSubcoreMesh(axis_name="core"), subcores()
        return cokernel.mpmd_map(
            [(scalar, stage), (vector, take)],
            jax.ShapeDtypeStruct((2, 16, 16), jnp.int32),
            scratch_types=[
                pltpu.VMEM_SHARED((16,), jnp.int32),
                pltpu.VMEM((16,), jnp.int32) @ vector,
                SEMAPHORE @ vector,
                SEMAPHORE @ scalar,
            ],
        )

    kernel = build()
    return lambda: kernel(jnp.arange(rounds * 16).reshape(rounds, 16))
