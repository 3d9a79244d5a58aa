"""What is handed to Mosaic for a TPU, which needs no TPU and no compiler for one."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _jax
from cokernel.aot import targets
from cokernel.lowering import tpu

F32 = jnp.float32
VECTOR = jax.ShapeDtypeStruct((16,), F32)


def sparse_meshes(num_cores=2):
    with cokernel.target("v6e"):
        return (
            plsc.ScalarSubcoreMesh(axis_name="core", num_cores=num_cores),
            plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=num_cores
            ),
        )


def lowered(function, *types, chip="v6e"):
    with jax.sharding.use_abstract_mesh(targets.find(chip).abstract_mesh()):
        return jax.jit(function).trace(*types).lower(lowering_platforms=("tpu",)).as_text()


def copy(x_ref, o_ref, row):
    pltpu.sync_copy(x_ref, row)
    pltpu.sync_copy(row, o_ref)


def test_a_kernel_is_one_call_with_its_name_metadata_cost_and_aliases():
    _, vectors = sparse_meshes()
    kernel = cokernel.kernel(
        copy,
        VECTOR,
        mesh=vectors,
        scratch_types=[pltpu.VMEM((16,), F32)],
        name="my_copy",
        metadata={"made": "by hand"},
        cost_estimate=pl.CostEstimate(flops=1, bytes_accessed=2, transcendentals=3),
        input_output_aliases={0: 0},
    )
    text = lowered(kernel, VECTOR)
    assert text.count("@tpu_custom_call") == 1
    assert 'kernel_name = "my_copy"' in text
    assert json.dumps({"made": "by hand"}).replace('"', "\\22") in text
    assert "output_operand_alias" in text


@pytest.mark.parametrize(("given", "disabled"), [(True, False), (False, True)])
def test_our_parameters_say_what_they_mean_to_mosaic(given, disabled):
    scalars, _ = sparse_meshes()
    own = cokernel.CompilerParams(bounds_checks=given, has_side_effects=True, collective_id=7)
    meant = tpu.compiler_params(own, [scalars])
    assert meant.disable_bounds_checks is disabled
    assert meant.has_side_effects is True
    assert meant.collective_id == 7
    assert meant.use_tc_tiling_on_sc is False


def test_mosaics_own_parameters_are_left_as_they_are():
    scalars, _ = sparse_meshes()
    given = pltpu.CompilerParams(vmem_limit_bytes=1 << 20)
    assert tpu.compiler_params(given, [scalars]) is given


def test_scalars_and_refs_can_be_closed_over():
    scalars, _ = sparse_meshes()

    def function(x, factor):
        ref = jax.new_ref(x)

        def body(o_ref, row):
            pltpu.sync_copy(ref, row)
            row[0] = row[0] * factor
            pltpu.sync_copy(row, ref)
            pltpu.sync_copy(row, o_ref)

        out = cokernel.kernel(
            body, VECTOR, mesh=scalars, scratch_types=[pltpu.SMEM((16,), F32)], name="closed"
        )()
        return out, ref[...]

    text = lowered(function, VECTOR, jax.ShapeDtypeStruct((), F32))
    assert text.count("@tpu_custom_call") == 1


@pytest.mark.parametrize(("printing", "expected"), [(False, False), (True, True)])
def test_a_kernel_that_prints_is_a_call_with_side_effects(printing, expected):
    mesh = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)

    def body(x_ref, o_ref):
        if printing:
            pl.debug_print("here")
        pltpu.sync_copy(x_ref, o_ref)

    text = lowered(cokernel.kernel(body, VECTOR, mesh=mesh), VECTOR)
    assert ("has_side_effect = true" in str(text)) == expected


def test_kernels_of_cpu_cores_are_refused_by_name():
    kernel = cokernel.kernel(
        copy, VECTOR, mesh=cokernel.CoreMesh(core=2), scratch_types=[cokernel.private((16,), F32)]
    )
    with pytest.raises(NotImplementedError, match=r"program copy at .* is on CoreMesh\(core=2\)"):
        lowered(kernel, VECTOR)


def test_a_chip_with_more_sparse_cores_than_the_mesh_leaves_some_idle():
    scalars, vectors = sparse_meshes()
    axes = []

    def program(o_ref):
        axes.append(lax.axis_size("core"))

    kernel = cokernel.mpmd_map([(scalars, program), (vectors, program)], VECTOR)
    lowered(kernel, chip="v6e")
    lowered(kernel, chip="v5p")
    # The programs go on counting the cores that they were made for.
    assert set(axes) == {2}
    jaxprs = jax.make_jaxpr(kernel)().eqns[0].params["jaxprs"]
    with jax.sharding.use_abstract_mesh(targets.find("v5p").abstract_mesh()):
        meshes, wide = tpu.tpu_cores.widened((scalars, vectors), jaxprs)
    assert [mesh.num_cores for mesh in meshes] == [4, 4]
    assert all(any(eqn.primitive is _jax.cond_p for eqn in jaxpr.eqns) for jaxpr in wide)
