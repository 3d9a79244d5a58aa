"""A launch in checked mode within jit, scan, vmap and shard_map: what is found reaches Python from
there, and the process goes on."""

import functools
import json
import re
import warnings
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


def races_on_some(x_ref, out_ref):
    @pl.when((x_ref[0] > 2) | (lax.axis_index("core") == 0))
    def _write():
        out_ref[0] = x_ref[0]


RACES_ON_SOME = cokernel.kernel(
    races_on_some, jax.ShapeDtypeStruct((1,), jnp.float32), mesh=cokernel.CoreMesh(core=2)
)
ROWS_OF_ONE = jnp.arange(5.0).reshape(5, 1)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_finding_under_vmap_names_the_element_of_the_batch(wrap):
    with (
        cokernel.checked(),
        pytest.raises(jax.errors.JaxRuntimeError, match="in batch element 3\n") as caught,
    ):
        jax.block_until_ready(wrap(jax.vmap(RACES_ON_SOME))(ROWS_OF_ONE))
    report = cokernel.report_of(caught.value)
    assert report.batch == ((3,),)
    assert [finding.batch for finding in report.findings] == [(3,)]
    assert ", in batch element 3, under 1 schedule" in report.coverage()
    plain = report.findings[0].to_dict()
    assert cokernel.Finding.from_dict(json.loads(json.dumps(plain))) == report.findings[0]


def test_an_exploration_under_vmap_says_how_many_elements_it_saw():
    report = cokernel.explore(jax.jit(jax.vmap(RACES_ON_SOME)), ROWS_OF_ONE, schedules=2)
    assert report.batch == tuple((number,) for number in range(5))
    assert ", in 5 batch elements, under 2 schedules" in report.coverage()
    [race] = report.of_kind("Race")
    assert race.batch == (3,)
    assert f"met {race.occurrences} times" in race.text()
    assert "in batch element 3, for the first time" in race.text()


def test_of_vmaps_within_vmaps_the_outermost_is_named_first():
    rows = jnp.zeros((2, 3, 1)).at[1, 2].set(9.0)
    report = cokernel.explore(jax.vmap(jax.vmap(RACES_ON_SOME)), rows, schedules=1)
    [race] = report.of_kind("Race")
    assert race.batch == (1, 2)
    assert "in batch element (1, 2)" in race.text()


def test_a_derivative_under_vmap_names_the_element():
    def tangent(x):
        return jax.jvp(RACES_ON_SOME, (x,), (jnp.ones(1),))

    report = cokernel.explore(jax.vmap(tangent), ROWS_OF_ONE, schedules=1)
    assert {race.batch for race in report.of_kind("Race")} == {(3,)}

    report = cokernel.explore(
        lambda x: jax.jvp(jax.vmap(RACES_ON_SOME), (x,), (x,)), ROWS_OF_ONE, schedules=1
    )
    assert {race.batch for race in report.of_kind("Race")} == {(3,)}


def test_a_batch_warns_once_of_what_all_its_elements_do():
    with cokernel.checked(on_finding="warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.block_until_ready(jax.vmap(RACES_ON_SOME)(ROWS_OF_ONE + 3))
    [warning] = caught
    assert "in batch element 0" in str(warning.message)


def test_outside_of_vmap_no_element_is_named():
    report = cokernel.explore(RACES_ON_SOME, jnp.full(1, 9.0), schedules=1)
    assert report.batch == ()
    assert "batch element" not in str(report)


def test_for_a_tpu_a_batched_kernel_takes_what_it_takes_without_checked_mode():
    with cokernel.target("v6e"):
        mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)
        out = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        kernel = cokernel.kernel(pltpu.sync_copy, out, mesh=mesh, name="copies")
        with cokernel.checked():
            traced = jax.jit(jax.vmap(kernel)).trace(jnp.ones((3, 8, 128)))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert re.findall(r"@tpu_custom_call\((%\w+)\)", text), text
