"""Kernels measured against chips."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import primitive
from cokernel.checking import chip_limits

WORDS = jax.ShapeDtypeStruct((64,), jnp.float32)


def vector_mesh():
    return plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")


def found(body, make_mesh, scratch, chip="tpu7x"):
    """The findings for a kernel of one program that takes and gives 64 words."""
    with cokernel.target(chip):
        kernel = cokernel.kernel(body, WORDS, mesh=make_mesh(), scratch_types=scratch)
        jaxpr = jax.make_jaxpr(kernel)(jnp.zeros(64))
    [eqn] = [eqn for eqn in primitive.all_equations(jaxpr) if "jaxprs" in eqn.params]
    return chip_limits.findings(
        eqn.params["jaxprs"], eqn.params["meshes"], ["body"], len(scratch), chip
    )


def test_a_kernel_within_the_limits_has_no_finding():
    def body(x_ref, o_ref, window):
        pltpu.sync_copy(x_ref.at[pl.ds(0, 16)], window)
        window[...] = window[...] + 1
        pltpu.sync_copy(window, o_ref.at[pl.ds(16, 16)])

    assert found(body, vector_mesh, [pltpu.VMEM((16,), jnp.float32)]) == []


def test_scratch_that_does_not_fit_is_named():
    def body(x_ref, o_ref, small, large):
        del x_ref, o_ref, small, large

    scratch = [pltpu.VMEM((16,), jnp.float32), pltpu.VMEM((1 << 18,), jnp.float32)]
    [finding] = found(body, vector_mesh, scratch)
    assert finding.name == "large"
    assert "1,048,640 bytes" in finding.sentence
    assert "524,288" in finding.sentence


def test_scopes_count_while_they_last():
    scoped = pltpu.VMEM((100_000,), jnp.float32)

    def one_after_the_other(x_ref, o_ref):
        pl.run_scoped(lambda window: None, scoped)
        pl.run_scoped(lambda window: None, scoped)

    def one_in_the_other(x_ref, o_ref):
        pl.run_scoped(lambda outer: pl.run_scoped(lambda inner: None, scoped), scoped)

    assert found(one_after_the_other, vector_mesh, []) == []
    [finding] = found(one_in_the_other, vector_mesh, [])
    assert "800,000 bytes" in finding.sentence
    assert finding.parties[0].code == (
        "pl.run_scoped(lambda outer: pl.run_scoped(lambda inner: None, scoped), scoped)"
    )


def test_a_tensor_core_pays_for_whole_tiles():
    def body(x_ref, o_ref, thin):
        del x_ref, o_ref, thin

    def tensor_mesh():
        return pltpu.TensorCoreMesh(axis_name="core", num_cores=1)

    scratch = [pltpu.VMEM((200_000, 1), jnp.float32)]
    [finding] = found(body, tensor_mesh, scratch)
    assert f"{200_000 * 128 * 4:,} bytes" in finding.sentence


@pytest.mark.parametrize(("chip", "lanes"), [("v6e", 8), ("tpu7x", 16)])
def test_a_value_that_is_no_register_is_found_by_its_line(chip, lanes):
    def body(x_ref, o_ref, window):
        value = window[...]
        window[...] = value + 1

    def finding_for(size):
        scratch = [pltpu.VMEM((size,), jnp.float32)]
        every = found(body, vector_mesh, scratch, chip)
        return [f for f in every if f.parties[0].code == "value = window[...]"]

    assert finding_for(lanes) == []
    [finding] = finding_for(2 * lanes)
    assert f"takes {lanes} elements" in finding.sentence
    assert finding.parties[0].code == "value = window[...]"


def test_narrow_elements_are_packed_into_a_register():
    def body(x_ref, o_ref, window):
        window[...] = window[...] * jnp.bfloat16(2)

    assert found(body, vector_mesh, [pltpu.VMEM((32,), jnp.bfloat16)]) == []


def test_a_dma_that_begins_or_ends_within_a_granule_is_found():
    def body(x_ref, o_ref, window):
        pltpu.sync_copy(x_ref.at[pl.ds(4, 16)], window)
        pltpu.sync_copy(window.at[pl.ds(0, 12)], o_ref.at[pl.ds(0, 12)])

    sentences = [f.sentence for f in found(body, vector_mesh, [pltpu.VMEM((16,), jnp.float32)])]
    assert any("begins 16 bytes into a row" in sentence for sentence in sentences)
    assert any("moves 48 bytes of each row" in sentence for sentence in sentences)
    assert len(sentences) == 2


@pytest.mark.filterwarnings("error")
def test_the_probes_of_checked_mode_are_not_measured():
    def body(x_ref, o_ref, window, narrow):
        pltpu.sync_copy(x_ref.at[pl.ds(0, 32)], window)
        narrow[...] = plsc.pack(
            window[pl.ds(0, 16)], window[pl.ds(16, 16)], format=plsc.PackFormat.INTERLEAVED
        )
        wide, _ = plsc.unpack(narrow[...] + narrow[...], format=plsc.PackFormat.INTERLEAVED)
        window[pl.ds(0, 16)] = wide
        pltpu.sync_copy(window, o_ref.at[pl.ds(0, 32)])
        pltpu.sync_copy(window, o_ref.at[pl.ds(32, 32)])

    with cokernel.target("tpu7x"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
        )
        scratch = [pltpu.VMEM((32,), jnp.float32), pltpu.VMEM((32,), jnp.bfloat16)]
        kernel = cokernel.kernel(
            body, WORDS, mesh=mesh, scratch_types=scratch, interpret=cokernel.Checked()
        )
        assert kernel(jnp.arange(64.0))[1] == 2


def test_a_line_is_told_once_for_all_its_values_of_a_kind():
    def body(x_ref, o_ref, window):
        window[0:24] = window[0:24] * 2 + window[0:24]
        window[0:24] = window[0:24].astype(jnp.int32).astype(jnp.float32)

    first, *others = found(body, vector_mesh, [pltpu.VMEM((32,), jnp.float32)])
    assert first.occurrences == 5
    assert first.parties[0].code == "window[0:24] = window[0:24] * 2 + window[0:24]"
    assert [other.sentence.split()[3] for other in others] == ["float32[24]", "int32[24]"]


def test_scratch_that_does_not_fit_is_told_with_the_line_that_made_the_kernel():
    def body(x_ref, o_ref, small, large):
        pltpu.sync_copy(x_ref, o_ref)

    with cokernel.target("tpu7x"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
        )
        scratch = [pltpu.VMEM((16,), jnp.float32), pltpu.VMEM((1 << 18,), jnp.float32)]
        kernel = cokernel.kernel(body, WORDS, mesh=mesh, scratch_types=scratch)
        options = cokernel.Checked(chip_limits="error")
        report = cokernel.explore(kernel, jnp.zeros(64), schedules=1, options=options)
    [finding] = report.of_kind("ChipLimit")
    assert "most of all for 'large' (1,048,576)" in finding.sentence
    made = "kernel = cokernel.kernel(body, WORDS, mesh=mesh, scratch_types=scratch)"
    assert finding.parties[0].code == made
