"""A kernel may keep its memory in every space that Pallas names, and say what it likes about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import _jax
from tests.compiler.harness import MESH

VALUES = np.arange(40, dtype=np.float32).reshape(4, 10)
CHANGED = np.concatenate([2 * VALUES[1:2], VALUES[1:]])
OUT = jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype)
OF_PALLAS = {
    "VMEM": pltpu.VMEM,
    "SMEM": pltpu.SMEM,
    "HBM": pltpu.HBM,
    "VMEM_SHARED": pltpu.VMEM_SHARED,
    "ANY": pl.ANY,
}
SPACES = {**OF_PALLAS, "host": jax.memory.Space.Host, "device": jax.memory.Space.Device}


def change(ref):
    ref[0] = ref[1] * 2


@pytest.mark.parametrize("name", SPACES)
def test_a_ref_of_the_kernels_own_lies_in_any_space(name):
    def body(x_ref, o_ref):
        own = jax.empty_ref(jax.typeof(x_ref[...]), memory_space=SPACES[name])
        own[...] = x_ref[...]
        change(own)
        pltpu.sync_copy(own, o_ref)

    np.testing.assert_array_equal(cokernel.mpmd_map([(MESH, body)], OUT)(VALUES), CHANGED)


@pytest.mark.parametrize(
    ("name", "is_tied"),
    [*((name, False) for name in OF_PALLAS), ("VMEM", True), ("SMEM", True), ("VMEM_SHARED", True)],
)
def test_scratch_lies_in_any_space_tied_to_the_mesh_or_not(name, is_tied):
    def body(x_ref, o_ref, scratch):
        pltpu.sync_copy(x_ref, scratch)
        change(scratch)
        pltpu.sync_copy(scratch, o_ref)

    scratch = OF_PALLAS[name](VALUES.shape, VALUES.dtype)
    scratch = scratch @ MESH if is_tied else scratch
    kernel = cokernel.kernel(body, OUT, mesh=MESH, scratch_types=[scratch])
    np.testing.assert_array_equal(kernel(VALUES), CHANGED)


@pytest.mark.parametrize("name", OF_PALLAS)
def test_a_result_lies_in_any_space(name):
    def body(x_ref, o_ref):
        pltpu.sync_copy(x_ref, o_ref)
        change(o_ref)

    kernel = cokernel.mpmd_map([(MESH, body)], OF_PALLAS[name](VALUES.shape, VALUES.dtype))
    np.testing.assert_array_equal(kernel(VALUES), CHANGED)


def test_a_cast_to_another_space_and_an_assumption_about_accesses_change_nothing():
    def body(x_ref, o_ref, scratch):
        cast = x_ref.at[pl.ds(0, 4)].memory_space_cast(pltpu.HBM)
        pltpu.sync_copy(cast, scratch)
        assumed = _jax.tpu_primitives.annotate(scratch.at[:, pl.ds(2, 5)], no_store=True)
        o_ref[...] = scratch[...]
        o_ref[:, :5] = assumed[...]

    scratch = [pltpu.VMEM(VALUES.shape, VALUES.dtype)]
    kernel = cokernel.kernel(body, OUT, mesh=MESH, scratch_types=scratch)
    expected = VALUES.copy()
    expected[:, :5] = VALUES[:, 2:7]
    np.testing.assert_array_equal(kernel(VALUES), expected)


def test_a_scope_is_shared_along_its_collective_axes():
    mesh = cokernel.CoreMesh(row=2, column=3)

    def body(o_ref):
        row, column = lax.axis_index("row"), lax.axis_index("column")

        def scoped(shared, done):
            shared[column] = 10 * row + column
            for other in range(3):
                pl.semaphore_signal(done, 1, device_id={"column": other})
            pl.semaphore_wait(done, 3)
            o_ref[row, column] = jnp.sum(shared[...])

        pl.run_scoped(
            lambda done: pl.run_scoped(
                lambda shared: scoped(shared, done),
                pltpu.VMEM((3,), jnp.int32),
                collective_axes="column",
            ),
            pltpu.SemaphoreType.REGULAR,
        )

    kernel = cokernel.mpmd_map([(mesh, body)], jax.ShapeDtypeStruct((2, 3), jnp.int32))
    np.testing.assert_array_equal(kernel(), [[3] * 3, [33] * 3])
