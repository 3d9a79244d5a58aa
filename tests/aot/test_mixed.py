"""Kernels with programs on TensorCores and SparseCores: two calls, or a refusal with the reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import aot

F32 = jnp.float32
BLOCK = jax.ShapeDtypeStruct((128, 128), F32)


def meshes():
    with cokernel.target("v6e"):
        vectors = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1
        )
    return vectors, pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)


def look_up_and_multiply(*, gather_writes_output=False, aliases=None):
    """Vector subcores gather rows of a table, and the TensorCore multiplies them by weights."""
    vectors, tensor = meshes()

    def gather(table_ref, rows_ref, weights_ref, out_ref, *, ring, full, mine, found, **_):
        share = pl.ds(lax.axis_index("subcore") * 8, 8)
        pltpu.sync_copy(rows_ref.at[share], mine)
        pltpu.sync_copy(table_ref.at[mine], found)
        pltpu.sync_copy(found, ring.at[share])
        if gather_writes_output:
            pltpu.sync_copy(found, out_ref.at[share])
        pl.semaphore_signal(full, 1, device_id={"tensor": 0})

    def multiply(table_ref, rows_ref, weights_ref, out_ref, *, ring, full, block, weights, **_):
        pltpu.sync_copy(weights_ref, weights)
        pl.semaphore_wait(full, 16)
        pltpu.sync_copy(ring, block)
        block[...] = jnp.dot(block[...], weights[...], preferred_element_type=F32)
        pltpu.sync_copy(block, out_ref)

    return cokernel.mpmd_map(
        [(vectors, gather), (tensor, multiply)],
        BLOCK,
        scratch_types={
            "ring": pltpu.HBM((128, 128), F32),
            "full": pltpu.SemaphoreType.REGULAR @ tensor,
            "mine": pltpu.VMEM((8,), jnp.int32) @ vectors,
            "found": pltpu.VMEM((8, 128), F32) @ vectors,
            "block": pltpu.VMEM((128, 128), F32) @ tensor,
            "weights": pltpu.VMEM((128, 128), F32) @ tensor,
        },
        input_output_aliases=aliases,
    )


TYPES = (jax.ShapeDtypeStruct((1000, 128), F32), jax.ShapeDtypeStruct((128,), jnp.int32), BLOCK)


def parts(report):
    return [call.part for call in report.calls]


def test_it_runs_natively_from_the_same_source():
    random = np.random.default_rng(0)
    # Small integers, so that the order in which products are added does not show.
    table, weights = (
        random.integers(-4, 4, shape).astype(np.float32) for shape in ((1000, 128), (128, 128))
    )
    rows = random.integers(0, 1000, 128, np.int32)
    result = look_up_and_multiply()(table, rows, weights)
    np.testing.assert_array_equal(result, table[rows] @ weights)


def test_its_two_calls_overlap_and_share_what_was_allocated(tpu):
    report = aot.compile_with(tpu, look_up_and_multiply(), *TYPES)
    assert report.accepted, str(report)
    assert parts(report) == ["allocate", "sparse", "tensor"]
    _, sparse, tensor = report.calls
    assert report.overlaps() == [(sparse.name, tensor.name)]


def test_an_output_that_both_write_is_copied_when_both_have_ended(tpu):
    kernel = look_up_and_multiply(gather_writes_output=True)
    report = aot.compile_with(tpu, kernel, *TYPES)
    assert report.accepted, str(report)
    assert parts(report) == ["allocate", "sparse", "tensor", "finish"]
    assert report.calls[-1].start >= max(call.end for call in report.calls[:-1])


@pytest.mark.parametrize("gather_writes_output", [False, True])
def test_an_output_can_overwrite_an_input(tpu, gather_writes_output):
    kernel = look_up_and_multiply(gather_writes_output=gather_writes_output, aliases={2: 0})
    report = aot.compile_with(tpu, kernel, *TYPES)
    assert report.accepted, str(report)


def test_its_calls_overlap_within_a_loop(tpu):
    kernel = look_up_and_multiply()

    def repeated(table, rows, weights):
        return lax.fori_loop(0, 3, lambda _, value: kernel(table, rows, value), weights)

    report = aot.compile_with(tpu, repeated, *TYPES)
    assert report.accepted, str(report)
    assert len(report.overlaps()) == 1


def signal_and_copy(sparse_writes):
    """A subcore signals the TensorCore, and needs no input if it writes no output."""
    vectors, tensor = meshes()

    def signal(x_ref, o_ref, *others, ready, block):
        pl.semaphore_signal(ready, device_id={"tensor": 0})
        for other_ref in others:
            pltpu.sync_copy(x_ref, other_ref)

    def copy(x_ref, o_ref, *others, ready, block):
        pl.semaphore_wait(ready, 16)
        pltpu.sync_copy(x_ref, block)
        pltpu.sync_copy(block, o_ref)

    return cokernel.mpmd_map(
        [(vectors, signal), (tensor, copy)],
        (BLOCK, BLOCK) if sparse_writes else BLOCK,
        scratch_types={
            "ready": pltpu.SemaphoreType.REGULAR @ tensor,
            "block": pltpu.VMEM(BLOCK.shape, F32) @ tensor,
        },
        name="signal_and_copy",
    )


@pytest.mark.parametrize("sparse_writes", [False, True])
def test_two_launches_one_behind_the_other_each_overlap(tpu, sparse_writes):
    kernel = signal_and_copy(sparse_writes)

    def last(x):
        return kernel(x)[-1] if sparse_writes else kernel(x)

    report = aot.compile_with(tpu, lambda x: last(jnp.sin(last(jnp.cos(x)))), BLOCK)
    assert report.accepted, str(report)
    by_name = {call.name: call.part for call in report.calls}
    pairs = [{by_name[name] for name in pair} for pair in report.overlaps()]
    assert pairs.count({"sparse", "tensor"}) >= 2


def test_results_that_nobody_uses_are_refused_where_they_keep_the_calls_apart(tpu):
    kernel = signal_and_copy(sparse_writes=True)

    def repeated(x, use):
        return lax.scan(lambda value, _: (use(*kernel(value)), None), x, length=3)[0]

    accepted = aot.compile_with(tpu, lambda x: repeated(x, lambda a, b: a + b), BLOCK)
    assert accepted.accepted, str(accepted)
    report = aot.compile_with(tpu, lambda x: repeated(x, lambda a, b: a), BLOCK)
    assert (report.accepted, report.stage) == (False, "schedule")
    assert "use both outputs" in report.message
    line = signal_and_copy.__code__.co_firstlineno
    assert report.place.line.startswith(f"{__file__}:")
    assert line < int(report.place.line.rpartition(":")[2]) < line + 20


def test_a_ref_that_both_use_stays_where_both_reach_it(tpu):
    vectors, tensor = meshes()

    def function(x):
        state = jax.new_ref(x)

        def read(o_ref, block):
            pltpu.sync_copy(state, o_ref)

        def read_and_write(o_ref, block):
            pltpu.sync_copy(state, block)
            pltpu.sync_copy(block, state)

        kernel = cokernel.mpmd_map(
            [(vectors, read), (tensor, read_and_write)],
            BLOCK,
            scratch_types=[pltpu.VMEM(BLOCK.shape, F32) @ tensor],
        )
        return kernel(), state[...]

    report = aot.compile_with(tpu, function, BLOCK)
    assert report.accepted, str(report)


def test_memory_that_is_not_there_is_named_though_the_compiler_crashes_for_it(tpu):
    vectors, tensor = meshes()

    def signal(o_ref, ready, block):
        pl.semaphore_signal(ready, device_id={"tensor": 0})

    def fill(o_ref, ready, block):
        pltpu.sync_copy(block.at[pl.ds(0, BLOCK.shape[0])], o_ref)

    kernel = cokernel.mpmd_map(
        [(vectors, signal), (tensor, fill)],
        BLOCK,
        scratch_types=[
            pltpu.SemaphoreType.REGULAR @ tensor,
            pltpu.VMEM((8_000_000, 128), F32) @ tensor,
        ],
    )
    report = aot.compile_with(tpu, kernel)
    assert not report.accepted
    assert "the largest piece is block: float32[8000000,128]" in report.place.what


def refused(programs, scratch_types):
    kernel = cokernel.mpmd_map(
        programs, jax.ShapeDtypeStruct((8,), F32), scratch_types=scratch_types, name="mixed"
    )
    with pytest.raises(NotImplementedError) as error:
        jax.jit(kernel).trace().lower(lowering_platforms=("tpu",))
    return str(error.value)


def test_a_signal_from_a_tensor_core_to_a_sparse_core_is_refused_at_its_line(line_of):
    vectors, tensor = meshes()

    def wait(out_ref, ready):
        pl.semaphore_wait(ready)

    def signal(out_ref, ready):
        pl.semaphore_signal(ready, 1, device_id={"core": 0, "subcore": 0})

    message = refused([(vectors, wait), (tensor, signal)], [pltpu.SemaphoreType.REGULAR @ vectors])
    assert "kernel 'mixed' cannot run on a TPU: program mixed__tc" in message
    assert f"uses 'ready' at {line_of(signal, 'semaphore_signal')}" in message
    assert "a semaphore of SparseCores, which TensorCores cannot signal" in message


@pytest.mark.parametrize("user", ["tensor", "vectors"])
def test_memory_of_the_other_kind_of_core_is_refused_at_its_line(user, line_of):
    vectors, tensor = meshes()
    owner = vectors if user == "tensor" else tensor

    def use(out_ref, memory):
        pltpu.sync_copy(memory, out_ref)

    def rest(out_ref, memory):
        del out_ref, memory

    programs = (
        [(vectors, rest), (tensor, use)] if user == "tensor" else [(vectors, use), (tensor, rest)]
    )
    message = refused(programs, [pltpu.VMEM((8,), F32) @ owner])
    assert f"uses 'memory' at {line_of(use, 'sync_copy')}" in message
    assert f"the memory of {owner}, which its cores do not reach" in message


def test_shared_memory_of_a_sparse_core_is_refused_to_a_tensor_core(line_of):
    vectors, tensor = meshes()

    def use(out_ref, memory):
        pltpu.sync_copy(memory, out_ref)

    def rest(out_ref, memory):
        del out_ref, memory

    message = refused([(vectors, rest), (tensor, use)], [pltpu.VMEM_SHARED((8,), F32)])
    assert f"uses 'memory' at {line_of(use, 'sync_copy')}" in message
    assert "which only SparseCores reach" in message
