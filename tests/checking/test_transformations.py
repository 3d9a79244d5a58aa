"""A launch in checked mode within jit, scan, vmap and shard_map: what is found reaches Python from
there, and the process goes on."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import cokernel

CORES = 3
DEVICES = 4


def neighbours(guarded: bool, **options) -> Callable:
    """x -> x rolled by one: each core publishes its row and reads that of the one before it.

    Unless it is guarded, nobody waits until the row is there.
    """

    def exchange(x_ref, out_ref, board, published):
        core = lax.axis_index("core")
        board[core] = x_ref[core]
        if guarded:
            pl.semaphore_signal(published, 1, device_id={"core": (core + 1) % CORES})
            pl.semaphore_wait(published, 1)
        out_ref[core] = board[(core + CORES - 1) % CORES]

    return cokernel.kernel(
        exchange,
        jax.ShapeDtypeStruct((CORES,), jnp.int32),
        mesh=cokernel.CoreMesh(core=CORES),
        scratch_types=[cokernel.shared((CORES,), jnp.int32), pltpu.SemaphoreType.REGULAR],
        **options,
    )


def in_jit(kernel):
    return jax.jit(kernel)


def in_scan(kernel):
    def all_rows(x):
        return lax.scan(lambda carry, row: (carry, kernel(row)), 0, x)[1]

    return jax.jit(all_rows)


def in_vmap(kernel):
    return jax.jit(jax.vmap(kernel))


def in_shard_map(kernel):
    mesh = jax.make_mesh(
        (DEVICES,),
        ("device",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices("cpu")[:DEVICES],
    )
    spec = PartitionSpec("device")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def on_a_device(x):
        return kernel(x[0])[None]

    return jax.jit(on_a_device)


# The transformation, and the shape of what it is given.
TRANSFORMATIONS = {
    "jit": (in_jit, (CORES,)),
    "scan": (in_scan, (5, CORES)),
    "vmap": (in_vmap, (5, CORES)),
    "shard_map": (in_shard_map, (DEVICES, CORES)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_race_reaches_python_and_the_process_goes_on(name):
    transform, shape = TRANSFORMATIONS[name]
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    expected = np.roll(x, 1, axis=-1)
    broken = transform(neighbours(False, interpret=cokernel.Checked(uninitialised=False)))
    repaired = transform(neighbours(True, interpret=cokernel.Checked()))
    native = transform(neighbours(True))
    for _ in range(3):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="Race") as caught:
            jax.block_until_ready(broken(x))
        assert "exchange" in str(caught.value)
        assert "board" in str(caught.value)
        report = cokernel.last_report()
        assert report is not None
        assert {finding.kind for finding in report.findings} == {"Race"}

        np.testing.assert_array_equal(repaired(x), expected)
        report = cokernel.last_report()
        assert report is not None
        assert report.is_clean
        np.testing.assert_array_equal(native(x), expected)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_block_asks_for_checked_mode_of_what_was_compiled_before_it(name):
    transform, shape = TRANSFORMATIONS[name]
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    function = transform(neighbours(False))
    jax.block_until_ready(function(x))
    with (
        cokernel.checked(uninitialised=False),
        pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="Race"),
    ):
        jax.block_until_ready(function(x))
    # Natively the cores race as before, and nothing is raised.
    assert jax.block_until_ready(function(x)).shape == shape


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_finding_that_only_warns_leaves_the_results(name):
    transform, shape = TRANSFORMATIONS[name]
    x = np.ones(shape, np.int32)
    options = cokernel.Checked(uninitialised=False, fill=0, on_finding="warn")
    function = transform(neighbours(False, interpret=options))
    with pytest.warns(match="Race"):
        result = np.asarray(function(x))
    assert set(result.ravel().tolist()) <= {0, 1}
