"""Kernels with a planted error are refused by the chip's compiler, at the line of the error."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import aot

F32 = jnp.float32


def vector_mesh():
    return plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore", num_cores=1)


def two_programs(tpu, fault):
    """A scalar and a vector subcore take turns; `fault` says what is planted. Marked lines are at
    fault."""
    with cokernel.target(tpu.target.name):
        vectors = vector_mesh()
        scalars = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1)
        lanes = plsc.get_sparse_core_info().num_lanes

    def announce(x_ref, o_ref, ready, row):
        @pl.loop(0, 16)
        def _subcore(subcore):
            pl.semaphore_signal(ready, 1, device_id={"core": 0, "subcore": subcore})

    def work(x_ref, o_ref, ready, row):
        pl.semaphore_wait(ready)

        @pl.loop(0, 4)
        def _step(step):
            pltpu.sync_copy(x_ref, row)  # memory
            if fault == "type":
                row[...] = row[...].astype(jnp.int8).astype(F32)  # type
            else:
                row[pl.ds(0, lanes)] = row[pl.ds(0, lanes)] * 2

        pltpu.sync_copy(row, o_ref)

    size = 300_000 if fault == "memory" else lanes
    shape = jax.ShapeDtypeStruct((size,), F32)
    kernel = cokernel.mpmd_map(
        [(scalars, announce), (vectors, work)],
        shape,
        scratch_types=[pltpu.SemaphoreType.REGULAR @ vectors, pltpu.VMEM((size,), F32) @ vectors],
    )
    return aot.compile_with(tpu, kernel, shape)


def marked(function, mark):
    lines, first = inspect.getsourcelines(function)
    [number] = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
    return f"{inspect.getsourcefile(function)}:{number}"


def test_the_kernel_without_a_fault_is_accepted(tpu):
    report = two_programs(tpu, None)
    assert report.accepted, str(report)
    assert report.code_bytes
    assert report.seconds
    [call] = report.calls
    assert (call.kernel, call.unit) == ("announce_and_work", "SparseCore")
    [use] = [use for use in report.memory if use.memory == "VMEM of a vector subcore"]
    assert use.asked == 4 * report_lanes(tpu)
    assert use.budget > 10_000


def report_lanes(tpu):
    with cokernel.target(tpu.target.name):
        return plsc.get_sparse_core_info().num_lanes


@pytest.mark.parametrize("fault", ["type", "memory"])
def test_a_fault_is_refused_at_its_line(tpu, fault):
    report = two_programs(tpu, fault)
    assert not report.accepted
    assert not report.crashed
    assert report.place.program == "work"
    assert report.place.line == marked(two_programs, fault)
    assert report.message
    assert report.place.line in str(report).replace("\n", "")


def test_memory_that_is_not_there_is_shown_beside_what_there_is(tpu):
    report = two_programs(tpu, "memory")
    [use] = [use for use in report.memory if use.exceeds]
    assert use.asked == 1_200_000
    assert use.largest == "row: float32[300000]"


def test_a_misaligned_slice_on_a_tensor_core_is_refused_at_its_line(tpu):
    mesh = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)

    def body(x_ref, o_ref, block):
        pltpu.sync_copy(x_ref.at[:, pl.ds(3, 128)], block)  # slice
        pltpu.sync_copy(block, o_ref)

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((8, 128), F32),
        mesh=mesh,
        scratch_types=[pltpu.VMEM((8, 128), F32)],
    )
    report = aot.compile_with(tpu, kernel, jax.ShapeDtypeStruct((8, 256), F32))
    assert not report.accepted
    assert report.place.line == marked(
        test_a_misaligned_slice_on_a_tensor_core_is_refused_at_its_line, "slice"
    )
    assert "aligned to tiles" in report.message


def test_memory_of_a_tensor_core_that_is_not_there_is_named_with_the_program(tpu):
    mesh = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)

    def body(x_ref, o_ref, block):
        pltpu.sync_copy(x_ref, block)
        pltpu.sync_copy(block, o_ref)

    shape = jax.ShapeDtypeStruct((100_000, 1024), F32)
    kernel = cokernel.kernel(
        body, shape, mesh=mesh, scratch_types=[pltpu.VMEM(shape.shape, F32)], name="big"
    )
    report = aot.compile_with(tpu, kernel, shape)
    assert not report.accepted
    assert report.place.program == "big"
    assert report.place.line.startswith(__file__)
    assert "block: float32[100000,1024]" in report.place.what


def test_what_cannot_be_traced_is_refused_at_its_line(tpu):
    with cokernel.target("v6e"):
        mesh = vector_mesh()

    def body(x_ref, o_ref):
        o_ref[...] = lax.axis_index("nowhere")  # axis

    kernel = cokernel.kernel(body, jax.ShapeDtypeStruct((8,), jnp.int32), mesh=mesh)
    report = aot.compile_with(tpu, kernel, jax.ShapeDtypeStruct((8,), jnp.int32))
    assert (report.accepted, report.stage) == (False, "trace")
    assert "nowhere" in report.message
    assert report.place.line == marked(test_what_cannot_be_traced_is_refused_at_its_line, "axis")


def test_a_function_of_several_devices_is_refused_with_what_to_do(tpu):
    devices = jax.make_mesh((1,), ("device",))
    share = jax.sharding.PartitionSpec("device")

    def several(x):
        return jax.shard_map(lambda y: y * 2, mesh=devices, in_specs=share, out_specs=share)(x)

    report = aot.compile_with(tpu, several, jax.ShapeDtypeStruct((8,), F32))
    assert (report.accepted, report.stage) == (False, "trace")
    assert "name the one that shard_map maps" in report.message
    assert report.place.line.startswith(f"{__file__}:")


def test_a_kernel_may_have_any_name(tpu):
    with cokernel.target(tpu.target.name):
        mesh = vector_mesh()

    def body(x_ref, o_ref):
        pltpu.sync_copy(x_ref, o_ref)

    name = """a "quoted" name: it's ünï\\code\n"""
    shape = jax.ShapeDtypeStruct((16,), F32)
    report = aot.compile_with(tpu, cokernel.kernel(body, shape, mesh=mesh, name=name), shape)
    assert report.accepted, str(report)
    assert [call.kernel for call in report.calls] == [name]


def test_a_function_without_kernels_is_said_to_call_none(tpu):
    report = aot.compile_with(tpu, lambda x: x + 1, jax.ShapeDtypeStruct((16,), F32))
    assert report.accepted
    assert "the compiled function calls no kernel of programs" in str(report)
    text = " ".join(str(report).split())
    assert "HBM: arguments 512, outputs 512, temporaries 0 bytes" in text
    assert f"of which the chip has {HBM[tpu.target.name]}" in text


# What Google's pages say of each chip's memory for one device of JAX.
HBM = {"v5p": "103,000,000,000", "v6e": "34,400,000,000", "tpu7x": "103,000,000,000"}
