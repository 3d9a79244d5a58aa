"""DMAs move what numpy's indexing moves, and signal their semaphores in bytes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.compiler.ops.dma_harness import DMA, FOUR, WORKERS, launch, like, numbers


def failure_of(*args, **params) -> str:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        launch(*args, **params)
    return str(caught.value)


DTYPES = [np.bool_, np.int8, np.int16, np.float16, ml_dtypes.bfloat16, np.int32, np.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("count", [1, 3, 16, 77, 511, 513, 5000])
def test_a_contiguous_copy_moves_every_byte_and_no_other(dtype, count):
    x = numbers((count,), dtype)
    around = numbers((count + 2,), dtype)

    def body(x_ref, out_ref, there, sem):
        pltpu.sync_copy(x_ref, there)
        copy = pltpu.make_async_copy(there, out_ref.at[pl.ds(1, count)], sem)
        copy.start()
        copy.wait()

    def with_surroundings(x_ref, around_ref, out_ref, there, sem):
        pltpu.sync_copy(around_ref, out_ref)
        body(x_ref, out_ref, there, sem)

    scratch = [cokernel.private(x.shape, x.dtype), DMA]
    out = launch(with_surroundings, like(around), x, around, scratch=scratch)
    expected = around.copy()
    expected[1:-1] = x
    np.testing.assert_array_equal(out, expected)


def box(extent):
    """A slice within an extent: start, size, stride."""

    @st.composite
    def draw(draw):
        stride = draw(st.integers(1, 3))
        size = draw(st.integers(1, (extent - 1) // stride + 1))
        start = draw(st.integers(0, extent - 1 - (size - 1) * stride))
        return start, size, stride

    return draw()


@settings(max_examples=25)
@given(data=st.data())
def test_strided_boxes_on_both_sides_are_copied_as_numpy_copies_them(data):
    shape = (5, 6, 7)
    source = [data.draw(box(extent)) for extent in shape]
    sizes = [size for _, size, _ in source]
    target = []
    for extent, size in zip(shape, sizes, strict=True):
        stride = data.draw(st.integers(1, max(1, (extent - 1) // max(size - 1, 1))))
        start = data.draw(st.integers(0, extent - 1 - (size - 1) * stride))
        target.append((start, size, stride))
    x = numbers(shape)

    def body(x_ref, zeros_ref, out_ref, room, sem):
        pltpu.sync_copy(x_ref, room)
        pltpu.sync_copy(zeros_ref, out_ref)
        where = tuple(pl.ds(*side) for side in source)
        to = tuple(pl.ds(*side) for side in target)
        pltpu.async_copy(room.at[where], out_ref.at[to], sem).wait()

    scratch = [cokernel.private(shape, x.dtype), DMA]
    out = launch(body, like(x), x, np.zeros_like(x), scratch=scratch)
    expected = np.zeros_like(x)
    slices = [
        tuple(slice(start, start + (size - 1) * stride + 1, stride) for start, size, stride in side)
        for side in (source, target)
    ]
    expected[slices[1]] = x[slices[0]]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("start", [0, 3, 9])
@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_copy_of_dynamic_start_and_size_signals_as_many_bytes_as_it_moves(start, size):
    x = numbers((16, 24))

    def body(where_ref, x_ref, zeros_ref, out_ref, count_ref, sem):
        start, size = where_ref[0], where_ref[1]
        pltpu.sync_copy(zeros_ref, out_ref)
        source = x_ref.at[pl.ds(start, size)]
        copy = pltpu.make_async_copy(source, out_ref.at[pl.ds(start, size)], sem)
        copy.start()
        count_ref[0] = pl.semaphore_read(sem)
        copy.wait()
        count_ref[1] = pl.semaphore_read(sem)

    counts = jax.ShapeDtypeStruct((2,), jnp.int32)
    where = np.array([start, size], np.int32)
    out, count = launch(body, (like(x), counts), where, x, np.zeros_like(x), scratch=[DMA])
    expected = np.zeros_like(x)
    expected[start : start + size] = x[start : start + size]
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(count, [size * 24 * 4, 0])


def test_a_dynamic_size_in_the_minor_dimension_is_copied_row_by_row():
    x = numbers((6, 40))

    def body(size_ref, x_ref, zeros_ref, out_ref, sem):
        pltpu.sync_copy(zeros_ref, out_ref)
        size = size_ref[0]
        part = pl.ds(2, 4), pl.ds(5, size)
        pltpu.async_copy(x_ref.at[part], out_ref.at[part], sem).wait()

    out = launch(body, like(x), np.array([33], np.int32), x, np.zeros_like(x), scratch=[DMA])
    expected = np.zeros_like(x)
    expected[2:6, 5:38] = x[2:6, 5:38]
    np.testing.assert_array_equal(out, expected)


def test_integer_indices_transposes_and_reshapes_of_refs_are_followed():
    x = numbers((3, 8, 16))

    def body(x_ref, out_ref, row, sem):
        pltpu.async_copy(x_ref.at[2, :, 5], row, sem).wait()
        pltpu.async_copy(row, out_ref.at[0, 0, pl.ds(0, 8)], sem).wait()
        flat = out_ref.at[1].reshape(128)
        pltpu.async_copy(x_ref.at[1].reshape(128), flat, sem).wait()
        pltpu.async_copy(x_ref.at[0].reshape(16, 8), out_ref.at[2].reshape(16, 8), sem).wait()

    out = launch(body, like(x), x, scratch=[cokernel.private((8,), x.dtype), DMA])
    np.testing.assert_array_equal(out[0, 0, :8], x[2, :, 5])
    np.testing.assert_array_equal(out[1], x[1])
    np.testing.assert_array_equal(out[2].ravel(), x[0].ravel())


def test_every_memory_reaches_every_other(v6e):
    x = numbers((16,), np.int32)
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore", num_cores=1)

    def body(x_ref, out_ref, *scratch):
        *spaces, sem = scratch

        @pl.when(lax.axis_index("subcore") == 7)
        def _one():
            # A round through all ordered pairs of spaces.
            here = x_ref
            for there in [*spaces, spaces[0], spaces[2], *spaces[::-1], out_ref]:
                pltpu.async_copy(here, there, sem).wait()
                here = there

    spaces = [pltpu.VMEM, pltpu.SMEM, pltpu.VMEM_SHARED, pltpu.HBM]
    scratch = [*(space((16,), jnp.int32) for space in spaces), DMA]
    np.testing.assert_array_equal(launch(body, like(x), x, mesh=mesh, scratch=scratch), x)


def test_overlapping_halves_of_one_ref_are_moved_as_if_through_a_copy():
    x = numbers((300,), np.int32)

    def body(x_ref, out_ref, sem):
        pltpu.sync_copy(x_ref, out_ref)
        pltpu.async_copy(out_ref.at[pl.ds(0, 290)], out_ref.at[pl.ds(10, 290)], sem).wait()
        pltpu.async_copy(out_ref.at[pl.ds(1, 30)], out_ref.at[pl.ds(0, 30)], sem).wait()

    expected = x.copy()
    expected[10:] = x[:290]
    expected[:30] = expected[1:31].copy()
    np.testing.assert_array_equal(launch(body, like(x), x, scratch=[DMA]), expected)


# Semaphores, other cores, and several Refs.


@WORKERS
def test_a_copy_to_another_core_signals_the_receiver_there_and_the_sender_here(workers):
    x = numbers((4, 200), np.int32)

    def body(x_ref, out_ref, sent_ref, outbox, inbox, sent, received):
        core = lax.axis_index("core")
        pltpu.sync_copy(x_ref.at[core], outbox)
        copy = pltpu.make_async_remote_copy(
            outbox, inbox, sent, received, device_id={"core": (core + 1) % 4}
        )
        copy.start()
        sent_ref[core] = pl.semaphore_read(sent)
        copy.wait_send()
        copy.wait_recv()
        pltpu.sync_copy(inbox, out_ref.at[core])

    private = cokernel.private((200,), jnp.int32)
    counts = jax.ShapeDtypeStruct((4,), jnp.int32)
    out, sent = launch(
        body,
        (like(x), counts),
        x,
        mesh=FOUR,
        scratch=[private, private, DMA, DMA],
        workers=workers,
    )
    np.testing.assert_array_equal(out, np.roll(x, 1, axis=0))
    np.testing.assert_array_equal(sent, 800)


@WORKERS
def test_scalar_subcores_copy_into_the_memory_of_vector_subcores(v6e, workers):
    scalar = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2)
    vector = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    x = numbers((2, 16, 32), np.int32)

    def hand_out(x_ref, out_ref, inbox, arrived, sent):
        core = lax.axis_index("core")

        @pl.loop(0, 16)
        def _one(subcore):
            copy = pltpu.make_async_remote_copy(
                x_ref.at[core, subcore],
                inbox,
                sent,
                arrived,
                # The core axis is the sender's own where it is not given.
                device_id={"subcore": subcore},
            )
            copy.start()
            copy.wait_send()

    def take(x_ref, out_ref, inbox, arrived, sent):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        pltpu.make_async_copy(inbox, inbox, arrived).wait()
        pltpu.sync_copy(inbox, out_ref.at[core, subcore])

    kernel = cokernel.mpmd_map(
        [(scalar, hand_out), (vector, take)],
        like(x),
        scratch_types=[
            (pltpu.VMEM @ vector)((32,), jnp.int32),
            (pltpu.SemaphoreType.DMA @ vector),
            (pltpu.SemaphoreType.DMA @ scalar),
        ],
        compiler_params=cokernel.CompilerParams(num_workers=workers, time_limit_s=60),
    )
    np.testing.assert_array_equal(kernel(x), x)


def test_a_copy_without_a_semaphore_is_done_when_it_has_started():
    x = numbers((12,), np.int32)

    def body(x_ref, out_ref):
        pltpu.make_async_copy(x_ref, out_ref).start()

    np.testing.assert_array_equal(launch(body, like(x), x), x)


def test_a_wait_may_use_another_descriptor_of_the_same_size():
    x = numbers((2, 64), np.int32)

    def body(x_ref, out_ref, sem):
        for row in range(2):
            pltpu.make_async_copy(x_ref.at[row], out_ref.at[1 - row], sem).start()
        # One wait for what both moved.
        pltpu.make_async_copy(x_ref, out_ref, sem).wait()

    np.testing.assert_array_equal(launch(body, like(x), x, scratch=[DMA]), x[::-1])


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_select_ref_chooses_source_and_target_at_run_time(chosen):
    x = [numbers((4, 8), np.int32) + 100 * number for number in range(3)]

    def body(which_ref, a_ref, b_ref, c_ref, one_ref, two_ref, sem):
        which = which_ref[0]
        for out in (one_ref, two_ref):
            pltpu.sync_copy(a_ref.at[0], out)
        source = pl.select_ref(which, a_ref.at[1], b_ref.at[2], c_ref.at[3])
        target = pl.select_ref(which % 2, one_ref, two_ref)
        pltpu.async_copy(source, target, sem).wait()

    which = np.array([chosen], np.int32)
    row = jax.ShapeDtypeStruct((8,), jnp.int32)
    outs = launch(body, (row, row), which, *x, scratch=[DMA])
    np.testing.assert_array_equal(outs[chosen % 2], x[chosen][chosen + 1])
    np.testing.assert_array_equal(outs[1 - chosen % 2], x[0][0])


def test_select_ref_with_an_index_out_of_range_fails():
    x = numbers((8,), np.int32)

    def body(which_ref, a_ref, b_ref, out_ref, sem):
        pltpu.async_copy(pl.select_ref(which_ref[0], a_ref, b_ref), out_ref, sem).wait()

    text = failure_of(body, like(x), np.array([2], np.int32), x, x, scratch=[DMA])
    assert "select_ref has 2 Refs (a_ref, b_ref), but the index is 2" in text


def test_sizes_that_differ_at_run_time_fail_and_name_both_refs():
    x = numbers((16, 4), np.int32)

    def body(size_ref, x_ref, out_ref, sem):
        source = x_ref.at[pl.ds(0, size_ref[0])]
        pltpu.async_copy(source, out_ref.at[pl.ds(0, size_ref[1])], sem).wait()

    text = failure_of(body, like(x), np.array([3, 4], np.int32), x, scratch=[DMA])
    assert "'x_ref" in text
    assert "'out_ref" in text
    assert "has 3" in text


def test_shapes_that_differ_are_refused_when_the_kernel_is_compiled():
    x = numbers((16,), np.int32)

    def body(x_ref, out_ref, sem):
        pltpu.async_copy(x_ref.at[pl.ds(0, 8)], out_ref, sem).wait()

    with pytest.raises(ValueError, match=r"'x_ref\[0:8\]' to 'out_ref' needs equal shapes"):
        launch(body, like(x), x, scratch=[DMA])


def test_a_window_past_the_end_fails_before_anything_is_written():
    x = numbers((16,), np.int32)

    def body(start_ref, x_ref, out_ref, sem):
        target = out_ref.at[pl.ds(start_ref[0], 8)]
        pltpu.async_copy(x_ref.at[pl.ds(0, 8)], target, sem).wait()

    for start in (-1, 9, 2**31 - 1):
        text = failure_of(body, like(x), np.array([start], np.int32), x, scratch=[DMA])
        assert "OutOfBounds" in text
        assert f"elements {start} to {start + 7}" in text
        assert "'out_ref'" in text


def test_statistics_count_dmas_and_their_bytes():
    from cokernel import _runtime

    x = numbers((7, 10), np.float32)

    def body(x_ref, out_ref, sem):
        @pl.loop(0, 7)
        def _row(row):
            pltpu.async_copy(x_ref.at[row], out_ref.at[row], sem).wait()

    launch(body, like(x), x, scratch=[DMA])
    [program] = _runtime.last_statistics()["programs"]
    assert (program["dma_count"], program["dma_bytes"]) == (7, 280)


@pytest.mark.parametrize("interpret", [False, cokernel.Checked(chip_limits="off")])
def test_indices_that_an_array_has_picked_are_refused_by_name(interpret):
    def body(x_ref, at_ref, o_ref):
        picked = at_ref.at[jnp.arange(4, dtype=jnp.int32)]
        pltpu.sync_copy(x_ref.at[picked], o_ref)

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((4, 8), jnp.float32),
        mesh=cokernel.CoreMesh(core=1),
        interpret=interpret,
    )
    with pytest.raises(NotImplementedError, match=r"dma_start.*'at_ref'.*read them first"):
        kernel(jnp.zeros((8, 8)), jnp.arange(8))
