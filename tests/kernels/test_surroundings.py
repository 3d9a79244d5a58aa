"""Kernels inside jit, scan and fori_loop, several in one jit, in many threads, on many devices."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import cokernel

CORES = 4


def rotate_kernel(compiler_params, factor=2):
    """x -> roll(x, 1) * factor + core, each row sent by its core to the next."""

    def rotate(x_ref, out_ref, row, inbox, sent, received):
        core = lax.axis_index("core")
        row[...] = x_ref[core] * factor
        message = pltpu.make_async_remote_copy(
            row, inbox, sent, received, device_id={"core": (core + 1) % CORES}
        )
        message.start()
        message.wait()
        out_ref[core] = inbox[...] + core

    return cokernel.kernel(
        rotate,
        jax.ShapeDtypeStruct((CORES, 6), jnp.int32),
        mesh=cokernel.CoreMesh(core=CORES),
        scratch_types=[
            cokernel.private((6,), jnp.int32),
            cokernel.private((6,), jnp.int32),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=compiler_params,
    )


def rotated(x, factor=2):
    return np.roll(x * np.int32(factor), 1, axis=0) + np.arange(CORES, dtype=np.int32)[:, None]


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).integers(-99, 99, (CORES, 6), np.int32)


def times(count, x):
    for _ in range(count):
        x = rotated(x)
    return x


def test_eagerly_and_inside_jit(x, compiler_params):
    kernel = rotate_kernel(compiler_params)
    np.testing.assert_array_equal(kernel(x), rotated(x))
    np.testing.assert_array_equal(jax.jit(lambda x: kernel(x + 1) - 1)(x), rotated(x + 1) - 1)


def test_inside_scan_and_fori_loop(x, compiler_params):
    kernel = rotate_kernel(compiler_params)
    last, all_of_them = lax.scan(lambda x, _: (kernel(x),) * 2, jnp.asarray(x), length=5)
    np.testing.assert_array_equal(last, times(5, x))
    np.testing.assert_array_equal(all_of_them, [times(n, x) for n in range(1, 6)])
    looped = jax.jit(lambda x, n: lax.fori_loop(0, n, lambda _, x: kernel(x), x))
    for count in (0, 1, 7):
        np.testing.assert_array_equal(looped(x, count), times(count, x))


def test_inside_a_branch_that_is_taken_or_not(x, compiler_params):
    kernel = rotate_kernel(compiler_params)
    branch = jax.jit(lambda x, taken: lax.cond(taken, kernel, lambda x: -x, x))
    np.testing.assert_array_equal(branch(x, True), rotated(x))
    np.testing.assert_array_equal(branch(x, False), -x)


def test_several_kernels_in_one_jit(x, compiler_params):
    doubling, tripling = rotate_kernel(compiler_params), rotate_kernel(compiler_params, 3)

    @jax.jit
    def several(x):
        y = doubling(x)
        return y, tripling(y), tripling(x) + doubling(y)

    one, two, three = several(x)
    np.testing.assert_array_equal(one, rotated(x))
    np.testing.assert_array_equal(two, rotated(rotated(x), 3))
    np.testing.assert_array_equal(three, rotated(x, 3) + rotated(rotated(x)))


def test_an_input_that_was_not_donated_keeps_its_value(x, compiler_params):
    def overwrite(x_ref, out_ref):
        core = lax.axis_index("core")
        out_ref[core] = out_ref[core] + 1

    kernel = cokernel.kernel(
        overwrite,
        jax.ShapeDtypeStruct((CORES, 6), jnp.int32),
        mesh=cokernel.CoreMesh(core=CORES),
        input_output_aliases={0: 0},
        compiler_params=compiler_params,
    )
    given = jnp.asarray(x)
    np.testing.assert_array_equal(kernel(given), x + 1)
    np.testing.assert_array_equal(given, x)


def test_a_ref_argument_is_changed_in_place(x, compiler_params):
    def add(total_ref, x_ref):
        core = lax.axis_index("core")
        total_ref[core] += x_ref[core]

    kernel = cokernel.kernel(
        add, mesh=cokernel.CoreMesh(core=CORES), compiler_params=compiler_params
    )
    total = jax.new_ref(jnp.zeros((CORES, 6), jnp.int32))
    for _ in range(3):
        kernel(total, x)
    np.testing.assert_array_equal(total[...], 3 * x)


def test_from_several_threads_at_once(x, compiler_params):
    kernel = jax.jit(rotate_kernel(compiler_params))
    wrong: list[object] = []

    def work(seed: int) -> None:
        mine = x + np.int32(seed)
        for _ in range(50):
            result = np.asarray(kernel(mine))
            if not np.array_equal(result, rotated(mine)):
                wrong.append((seed, result))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_on_every_device_of_a_shard_map(compiler_params):
    devices = jax.devices("cpu")
    assert len(devices) > 1, "tests/conftest.py asks for several CPU devices"
    mesh = jax.make_mesh((len(devices),), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    kernel = rotate_kernel(compiler_params)
    spec = PartitionSpec("device")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def sharded(x):
        return kernel(x)

    shape = (len(devices) * CORES, 6)
    x = np.random.default_rng(0).integers(-99, 99, shape, np.int32)
    expected = np.concatenate([rotated(part) for part in np.split(x, len(devices))])
    for _ in range(20):
        np.testing.assert_array_equal(sharded(x), expected)


def test_a_program_knows_the_device_it_runs_on(compiler_params):
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((len(devices),), ("device",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(out_ref):
        core = lax.axis_index("core")
        out_ref[core] = 100 * lax.axis_index("device") + core

    kernel = cokernel.kernel(
        place,
        jax.ShapeDtypeStruct((CORES,), jnp.int32),
        mesh=cokernel.CoreMesh(core=CORES),
        compiler_params=compiler_params,
    )
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=(), out_specs=PartitionSpec("device"))
    expected = 100 * np.arange(len(devices))[:, None] + np.arange(CORES)
    np.testing.assert_array_equal(jax.jit(sharded)(), expected.ravel())
