"""Semaphores, barriers and sums in other cores' memory do what the hardware's would."""

import contextlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _jax
from tests.compiler import tolerance

FOUR = cokernel.CoreMesh(core=4)
GRID = cokernel.CoreMesh(row=2, column=3)
SEMAPHORE = pltpu.SemaphoreType.REGULAR


@pytest.fixture(params=(1, 2, 4), ids="{}_workers".format)
def params(request):
    return cokernel.CompilerParams(num_workers=request.param, time_limit_s=60)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def launch(body, out_types, *arrays, mesh=FOUR, scratch=(), params=None):
    kernel = cokernel.kernel(
        body, out_types, mesh=mesh, scratch_types=scratch, compiler_params=params
    )
    return jax.tree.map(np.asarray, kernel(*arrays))


def failure_of(*args, **params) -> str:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        launch(*args, **params)
    return str(caught.value)


def test_a_signal_without_device_id_goes_to_the_signalling_cores_own_semaphore(params):
    def body(out_ref, sem):
        core = lax.axis_index("core")
        pl.semaphore_signal(sem, core + 1)
        out_ref[core] = pl.semaphore_read(sem)
        pl.semaphore_wait(sem, core + 1)

    out = launch(body, ints(4), scratch=[SEMAPHORE], params=params)
    np.testing.assert_array_equal(out, [1, 2, 3, 4])


def test_a_wait_takes_its_value_and_one_without_decrement_only_looks(params):
    def body(out_ref, sem):
        pl.semaphore_signal(sem, 5)
        pl.semaphore_wait(sem, 2)
        out_ref[0] = pl.semaphore_read(sem)
        pl.semaphore_wait(sem, 3, decrement=False)
        out_ref[1] = pl.semaphore_read(sem)
        pl.semaphore_wait(sem, 3)
        out_ref[2] = pl.semaphore_read(sem)

    mesh = cokernel.CoreMesh(core=1)
    out = launch(body, ints(3), mesh=mesh, scratch=[SEMAPHORE], params=params)
    np.testing.assert_array_equal(out, [3, 3, 0])


def test_an_axis_that_device_id_leaves_out_keeps_the_own_position(params):
    def body(out_ref, sem):
        row, column = lax.axis_index("row"), lax.axis_index("column")

        @pl.when(column == 0)
        def _along_the_row():
            for other in range(3):
                pl.semaphore_signal(sem, 1 + row, device_id={"column": other})

        pl.semaphore_wait(sem, 1 + row)
        out_ref[row, column] = pl.semaphore_read(sem)

    out = launch(body, ints(2, 3), mesh=GRID, scratch=[SEMAPHORE], params=params)
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize(
    "device_id",
    [
        lambda row, column: {"row": row, "column": column},
        lambda row, column: {("row", "column"): row * 3 + column},
        lambda row, column: {("column", "row"): column * 2 + row},
        lambda row, column: {("row",): row, "column": column},
        lambda row, column: (row, column),
    ],
    ids=["axes", "joint axes", "joint axes the other way", "mixed keys", "coordinates"],
)
def test_every_spelling_of_device_id_reaches_the_core_it_names(device_id, params):
    def body(out_ref, sem):
        row, column = lax.axis_index("row"), lax.axis_index("column")
        target = (row + 1) % 2, (column + 1) % 3
        number = row * 3 + column
        pl.semaphore_signal(sem, number + 1, device_id=device_id(*target))
        giver = ((row + 1) % 2) * 3 + (column + 2) % 3
        pl.semaphore_wait(sem, giver + 1)
        out_ref[number] = pl.semaphore_read(sem)

    out = launch(body, ints(6), mesh=GRID, scratch=[SEMAPHORE], params=params)
    np.testing.assert_array_equal(out, 0)


@pytest.mark.filterwarnings("ignore:.*(DeviceIdType|device_id_type):DeprecationWarning")
def test_a_logical_device_id_counts_cores_row_by_row(params):
    def body(out_ref, sem):
        number = lax.axis_index(("row", "column"))
        pl.semaphore_signal(
            sem,
            10 + number,
            device_id=(number + 1) % 6,
            device_id_type=pl.DeviceIdType.LOGICAL,
        )
        pl.semaphore_wait(sem, 10 + (number + 5) % 6)
        out_ref[number] = pl.semaphore_read(sem)

    out = launch(body, ints(6), mesh=GRID, scratch=[SEMAPHORE], params=params)
    np.testing.assert_array_equal(out, 0)


def test_core_index_names_a_core_of_a_tensor_core_mesh(params):
    with cokernel.target("v5p"):
        mesh = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=2)

        def body(out_ref, sem):
            core = lax.axis_index("tensor")
            pl.semaphore_signal(sem, 1 + core, core_index=1 - core)
            pl.semaphore_wait(sem, 2 - core)
            out_ref[core] = pl.semaphore_read(sem)

        out = launch(body, ints(2), mesh=mesh, scratch=[SEMAPHORE], params=params)
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("position", [3, -1, 2**31 - 1])
def test_a_position_that_no_core_has_fails_and_names_the_axis(position, params):
    def body(where_ref, out_ref, sem):
        pl.semaphore_signal(sem, 1, device_id={"column": where_ref[0]})
        out_ref[0] = 1

    where = np.array([position], np.int32)
    text = failure_of(body, ints(1), where, mesh=GRID, scratch=[SEMAPHORE], params=params)
    assert f"no position {position} on axis 'column', which has 3" in text
    assert "semaphore_signal of 'sem'" in text


def test_a_constant_position_that_no_core_has_fails_only_where_it_is_used(params):
    def body(go_ref, out_ref, sem):
        @pl.when(go_ref[0] == 1)
        def _wrong():
            pl.semaphore_signal(sem, 1, device_id={"row": 2})

        out_ref[0] = 1

    scratch = [SEMAPHORE]
    for go in (0, 1):
        run = launch if go == 0 else failure_of
        go_array = np.array([go], np.int32)
        result = run(body, ints(1), go_array, mesh=GRID, scratch=scratch, params=params)
        assert go == 0 or "no position 2 on axis 'row'" in result


@pytest.mark.parametrize("use", ["signal", "wait"])
def test_a_negative_amount_fails_with_the_line(use, params):
    def body(amount_ref, out_ref, sem):
        if use == "signal":
            pl.semaphore_signal(sem, amount_ref[0])
        else:
            pl.semaphore_wait(sem, amount_ref[0])
        out_ref[0] = 1

    text = failure_of(body, ints(1), np.array([-2], np.int32), scratch=[SEMAPHORE], params=params)
    assert "must not be negative, but is -2" in text
    assert f"semaphore_{use}(sem, amount_ref[0])" in text


def test_an_unknown_axis_is_refused_when_the_kernel_is_compiled():
    other = cokernel.CoreMesh(lane=2)

    def body(out_ref, sem, theirs):
        pl.semaphore_signal(sem, 1, device_id={"lane": 0})

    def idle(out_ref, sem, theirs):
        pass

    kernel = cokernel.mpmd_map(
        [(FOUR, body), (other, idle)],
        ints(1),
        scratch_types=[SEMAPHORE @ FOUR, SEMAPHORE @ other],
    )
    with pytest.raises((ValueError, NameError), match="lane"):
        kernel()


def two_meshes(signaller, waiter, params, meshes):
    first, second = meshes
    kernel = cokernel.mpmd_map(
        [(first, signaller), (second, waiter)],
        ints(4),
        scratch_types=[SEMAPHORE @ first, SEMAPHORE @ second],
        compiler_params=params,
    )
    return np.asarray(kernel())


def test_a_semaphore_of_another_mesh_needs_all_positions_that_the_own_mesh_lacks(params):
    lanes = cokernel.CoreMesh(lane=4)

    def forgets(out_ref, mine, theirs):
        pl.semaphore_signal(theirs, 1)

    def names(out_ref, mine, theirs):
        pl.semaphore_signal(theirs, 1, device_id={"lane": lax.axis_index("core")})

    def waits(out_ref, theirs, mine):
        pl.semaphore_wait(mine, 1)
        out_ref[lax.axis_index("lane")] = 7

    with pytest.raises(ValueError, match=r"'theirs'.*another mesh.*lane=4.*axis 'lane'"):
        two_meshes(forgets, waits, params, (FOUR, lanes))
    np.testing.assert_array_equal(two_meshes(names, waits, params, (FOUR, lanes)), 7)


def test_waiting_for_a_semaphore_of_another_mesh_is_refused():
    lanes = cokernel.CoreMesh(lane=4)

    def waits(out_ref, mine, theirs):
        pl.semaphore_wait(theirs, 1)

    def idle(out_ref, theirs, mine):
        pass

    message = r"semaphore_wait of 'theirs': .* another mesh, CoreMesh\(lane=4\), and only they can"
    with pytest.raises(ValueError, match=message):
        two_meshes(waits, idle, None, (FOUR, lanes))


def test_vector_subcores_signal_the_scalar_subcore_of_their_own_sparse_core(v6e, params):
    scalar = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2)
    vector = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    def collect(out_ref, arrived, go):
        core = lax.axis_index("core")
        pl.semaphore_wait(arrived, 16 * (core + 1))
        out_ref[core] = pl.semaphore_read(arrived)
        for subcore in range(16):
            pl.semaphore_signal(go, 1, device_id={"subcore": subcore})

    def report(out_ref, arrived, go):
        # The axis that both meshes have in common need not be named.
        pl.semaphore_signal(arrived, lax.axis_index("core") + 1)
        pl.semaphore_wait(go, 1)

    kernel = cokernel.mpmd_map(
        [(scalar, collect), (vector, report)],
        ints(2),
        scratch_types=[SEMAPHORE @ scalar, SEMAPHORE @ vector],
        compiler_params=params,
    )
    np.testing.assert_array_equal(kernel(), 0)


def test_elements_of_arrays_of_semaphores_are_separate(params):
    def body(order_ref, out_ref, sems):
        core = lax.axis_index("core")
        for row in range(2):
            for column in range(3):
                pl.semaphore_signal(sems.at[row, column], row * 3 + column)
        for number in range(6):
            which = order_ref[number]
            pl.semaphore_wait(sems.at[which // 3, which % 3], which)
            out_ref[core, number] = pl.semaphore_read(sems.at[which // 3, which % 3])

    order = np.array([4, 2, 0, 5, 1, 3], np.int32)
    out = launch(body, ints(4, 6), order, scratch=[SEMAPHORE((2, 3))], params=params)
    np.testing.assert_array_equal(out, 0)


def test_an_element_outside_an_array_of_semaphores_is_out_of_bounds(params):
    def body(which_ref, out_ref, sems):
        pl.semaphore_signal(sems.at[which_ref[0]], 1)
        out_ref[0] = 1

    which = np.array([3], np.int32)
    text = failure_of(body, ints(1), which, scratch=[SEMAPHORE((3,))], params=params)
    assert "OutOfBounds" in text
    assert "index 3" in text
    assert "'sems'" in text


def test_polling_a_semaphore_lets_those_run_who_will_signal_it(params):
    def body(out_ref, sem):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _poll():
            polls = lax.while_loop(
                lambda polls: pl.semaphore_read(sem) < 3, lambda polls: polls + 1, 0
            )
            out_ref[0] = jnp.minimum(polls, 0) + 11
            pl.semaphore_wait(sem, 3)

        @pl.when(core != 0)
        def _signal():
            pl.semaphore_signal(sem, 1, device_id={"core": 0})
            out_ref[core] = core

    out = launch(body, ints(4), scratch=[SEMAPHORE], params=params)
    np.testing.assert_array_equal(out, [11, 1, 2, 3])


def test_the_barrier_separates_what_subcores_of_one_sparse_core_do(v6e, params):
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    def body(out_ref, board, line):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        for turn in range(1, 4):
            line[...] = jnp.full((8,), subcore * turn + core, jnp.int32)
            pltpu.sync_copy(line, board.at[subcore])
            plsc.subcore_barrier()
            pltpu.sync_copy(board.at[(subcore + turn) % 16], line)
            pltpu.sync_copy(line, out_ref.at[core, subcore, turn - 1])
            plsc.subcore_barrier()

    scratch = [pltpu.VMEM_SHARED((16, 8), jnp.int32), pltpu.VMEM((8,), jnp.int32)]
    out = launch(body, ints(2, 16, 3, 8), mesh=mesh, scratch=scratch, params=params)
    core, subcore, turn = np.ogrid[:2, :16, 1:4]
    expected = (subcore + turn) % 16 * turn + core
    np.testing.assert_array_equal(out, np.repeat(expected[..., None], 8, axis=-1))


def test_the_barrier_joins_all_cores_of_a_core_mesh(params):
    def body(out_ref, board):
        number = lax.axis_index(("row", "column"))
        board[number] = number * number
        plsc.subcore_barrier()
        out_ref[number] = board[5 - number]

    out = launch(
        body, ints(6), mesh=GRID, scratch=[cokernel.shared((6,), jnp.int32)], params=params
    )
    np.testing.assert_array_equal(out, np.arange(6)[::-1] ** 2)


def test_the_barrier_is_refused_where_there_are_no_subcores(v6e):
    def body(out_ref):
        plsc.subcore_barrier()

    mesh = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2)
    with pytest.raises(ValueError, match="subcore_barrier joins the vector subcores"):
        launch(body, ints(1), mesh=mesh)


def test_the_barrier_semaphore_is_one_and_the_same_wherever_a_core_asks_for_it(params):
    def body(out_ref):
        core = lax.axis_index("core")
        for other in range(4):
            pl.semaphore_signal(pltpu.get_barrier_semaphore(), 1, device_id={"core": other})
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_wait(barrier, 3)
        pl.semaphore_wait(pltpu.get_barrier_semaphore(), 1)
        out_ref[core] = pl.semaphore_read(barrier)

    out = launch(body, ints(4), params=params)
    np.testing.assert_array_equal(out, 0)


def test_barrier_semaphores_of_different_tags_are_different(params):
    def body(out_ref):
        core = lax.axis_index("core")
        one, two = (pltpu.get_barrier_semaphore(tag) for tag in ("one", "two"))
        pl.semaphore_signal(one, 5, device_id={"core": 3 - core})
        out_ref[core] = pl.semaphore_read(two)
        pl.semaphore_wait(one, 5)

    np.testing.assert_array_equal(launch(body, ints(4), params=params), 0)


def test_programs_reach_each_others_barrier_semaphores_by_their_axes(params):
    lanes = cokernel.CoreMesh(lane=2)

    def first(out_ref):
        core = lax.axis_index("core")
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_signal(barrier, 1, device_id={"lane": core // 2})
        pl.semaphore_wait(barrier, 1)
        out_ref[core] = pl.semaphore_read(barrier)

    def second(out_ref):
        lane = lax.axis_index("lane")
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_wait(barrier, 2)
        for core in range(2):
            pl.semaphore_signal(barrier, 1, device_id={"core": lane * 2 + core})
        out_ref[4 + lane] = pl.semaphore_read(barrier)

    kernel = cokernel.mpmd_map([(FOUR, first), (lanes, second)], ints(6), compiler_params=params)
    np.testing.assert_array_equal(kernel(), 0)


def test_fetch_and_add_hands_out_every_number_once(v6e, params):
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore", num_cores=1)

    def body(out_ref, tickets, mine):
        subcore = lax.axis_index("subcore")

        @pl.when(subcore == 5)
        def _start():
            tickets[1] = 100

        plsc.subcore_barrier()
        for turn in range(8):
            mine[turn] = plsc.fetch_and_add(tickets.at[1], 2, subcore_id=5)
        plsc.subcore_barrier()
        pltpu.sync_copy(mine, out_ref.at[subcore])

    scratch = [pltpu.SMEM((3,), jnp.int32), pltpu.SMEM((8,), jnp.int32)]
    out = launch(body, ints(16, 8), mesh=mesh, scratch=scratch, params=params)
    np.testing.assert_array_equal(np.sort(out.ravel()), 100 + 2 * np.arange(128))
    tolerance.note(_jax.sc_primitives.fetch_and_add_p, np.int32, 0.0)


def test_fetch_and_add_on_a_subcore_that_does_not_exist_fails(v6e, params):
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore", num_cores=1)

    def body(which_ref, out_ref, tickets):
        out_ref[0] = plsc.fetch_and_add(tickets.at[0], 1, subcore_id=which_ref[0])

    which = np.array([16], np.int32)
    scratch = [pltpu.SMEM((1,), jnp.int32)]
    text = failure_of(body, ints(1), which, mesh=mesh, scratch=scratch, params=params)
    assert "no position 16 on axis 'subcore'" in text


def test_delay_lasts_at_least_as_long_as_it_is_told():
    def body(out_ref):
        pl.delay(30_000_000)
        out_ref[0] = 1

    mesh = cokernel.CoreMesh(core=1)
    launch(body, ints(1), mesh=mesh)
    start = time.perf_counter()
    launch(body, ints(1), mesh=mesh)
    assert time.perf_counter() - start >= 0.03


def under_shard_map(device_id):
    """The cores of each of four devices signal those that `device_id(device, other core)` names."""
    devices = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("device",))
    spec = jax.sharding.PartitionSpec("device")
    mesh = cokernel.CoreMesh(core=2)

    def body(x_ref, out_ref, sem):
        core, own = lax.axis_index("core"), lax.axis_index("device")
        pl.semaphore_signal(sem, 1, device_id=device_id(own, 1 - core))
        pl.semaphore_wait(sem, 1)
        out_ref[core] = x_ref[core] + own

    kernel = cokernel.kernel(body, ints(2), mesh=mesh, scratch_types=[SEMAPHORE])
    mapped = jax.shard_map(kernel, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(mapped)(jnp.arange(8, dtype=jnp.int32)))


@pytest.mark.parametrize(
    "device_id",
    [
        lambda own, other: {"device": own, "core": other},
        lambda own, other: {("device", "core"): own * 2 + other},
        # Coordinates mean devices where there are several.
        lambda own, other: (own,),
    ],
    ids=["axes", "joint axes", "coordinates"],
)
def test_naming_the_own_device_of_a_shard_map_is_fine(device_id):
    out = under_shard_map(device_id)
    np.testing.assert_array_equal(out, np.arange(8) + np.arange(8) // 2)


@pytest.mark.parametrize(
    "device_id",
    [
        lambda own, other: {"device": (own + 1) % 4, "core": other},
        lambda own, other: ((own + 1) % 4,),
    ],
    ids=["axes", "coordinates"],
)
def test_naming_another_device_of_a_shard_map_fails_and_says_so(device_id):
    with pytest.raises(jax.errors.JaxRuntimeError, match="cannot reach other devices yet"):
        under_shard_map(device_id)
    # JAX keeps the error for the next to ask for effects.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
