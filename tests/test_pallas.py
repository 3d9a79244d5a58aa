"""Stock Pallas kernels, written against public Pallas names only, run on the CPU backend."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
import cokernel.pallas

X = np.arange(64, dtype=np.float32)


@pytest.fixture(autouse=True)
def _chip():
    with cokernel.target("v6e"):
        yield


def vector_mesh():
    return plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=2, num_subcores=4
    )


def double(x_ref, out_ref, buffer):
    part = pl.ds((lax.axis_index("core") * 4 + lax.axis_index("subcore")) * 8, 8)
    pltpu.sync_copy(x_ref.at[part], buffer)
    buffer[...] = buffer[...] * 2
    pltpu.sync_copy(buffer, out_ref.at[part])


def one_mesh(**options):
    return pl.kernel(
        double,
        out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
        mesh=vector_mesh(),
        scratch_types=[pltpu.VMEM((8,), jnp.float32)],
        **options,
    )


def two_meshes():
    vectors = vector_mesh()
    scalars = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2)

    def wait_and_double(x_ref, out_ref, buffer, ready):
        pl.semaphore_wait(ready, 1)
        double(x_ref, out_ref, buffer)

    def release(x_ref, out_ref, buffer, ready):
        for subcore in range(4):
            pl.semaphore_signal(ready, 1, device_id={"subcore": subcore})

    return pl.kernel(
        [wait_and_double, release],
        out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
        mesh=[vectors, scalars],
        scratch_types=[
            (pltpu.VMEM @ vectors)((8,), jnp.float32),
            pltpu.SemaphoreType.REGULAR @ vectors,
        ],
    )


@pytest.mark.parametrize("interpret", [False, True, pltpu.InterpretParams()])
def test_a_kernel_of_one_mesh(interpret):
    with cokernel.pallas.enabled():
        np.testing.assert_array_equal(one_mesh(interpret=interpret)(X), X * 2)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_kernel_of_two_meshes(transform):
    with cokernel.pallas.enabled():
        np.testing.assert_array_equal(transform(two_meshes())(X), X * 2)


def test_outside_jax_does_what_it_did():
    kernel = jax.jit(two_meshes())
    with cokernel.pallas.enabled():
        np.testing.assert_array_equal(kernel(X), X * 2)
    # The same function, already compiled with our backend, must not be taken from a cache.
    with pytest.raises(NotImplementedError, match="multiple mesh/function pairs"):
        kernel(X)


def test_enable_and_disable():
    table = cokernel._jax.platform_lowerings["cpu"]
    kernel = jax.jit(two_meshes())
    cokernel.pallas.enable()
    cokernel.pallas.enable()
    try:
        np.testing.assert_array_equal(kernel(X), X * 2)
    finally:
        cokernel.pallas.disable()
    cokernel.pallas.disable()
    assert cokernel._jax.stock_mpmd_map_p not in table
    with pytest.raises(NotImplementedError, match="multiple mesh/function pairs"):
        kernel(X)


def test_the_block_holds_for_its_own_thread():
    inside, checked = threading.Event(), threading.Event()
    outcome = []

    def other():
        inside.wait()
        with cokernel.target("v6e"):
            try:
                two_meshes()(X)
            except NotImplementedError as error:
                outcome.append(str(error))
        checked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with cokernel.pallas.enabled():
        inside.set()
        checked.wait()
        np.testing.assert_array_equal(two_meshes()(X), X * 2)
    thread.join()
    assert len(outcome) == 1
    assert "multiple mesh/function pairs" in outcome[0]


def test_a_deadlock_of_a_stock_kernel_is_reported():
    mesh = vector_mesh()

    def wait(x_ref, out_ref, never):
        pl.semaphore_wait(never, 1)

    kernel = pl.kernel(
        wait,
        out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
        mesh=mesh,
        scratch_types=[pltpu.SemaphoreType.REGULAR],
    )
    with cokernel.pallas.enabled(), pytest.raises(Exception, match=r"(?s)Deadlock:.*'never'"):
        jax.block_until_ready(kernel(X))
