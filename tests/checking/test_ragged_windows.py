"""What hangs over the end of an operand in a pipeline's last window is undefined, whatever the slot
has held before."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import Finding

LANES = 128


pytestmark = pytest.mark.usefixtures("form")


def explored(body, out, *arrays, stock=False, mesh=None, chip="v6e"):
    make = pl.kernel if stock else cokernel.kernel
    with cokernel.pallas.enabled(), cokernel.target(chip):
        mesh = mesh or pltpu.TensorCoreMesh(axis_name="core", num_cores=1)
        kernel = make(body, out_type=jax.ShapeDtypeStruct(out, jnp.float32), mesh=mesh)
        return cokernel.explore(kernel, *arrays, schedules=2)


def piped(step, shape, block, *, buffers=2, stock=False):
    """Runs a pipeline over all blocks of an array, with an output of the same windows."""
    rank = len(shape)
    grid = tuple(pl.cdiv(extent, size) for extent, size in zip(shape, block, strict=True))

    def spec(**mode):
        return pl.BlockSpec(block, lambda *position: position, **mode)

    def body(x_ref, o_ref):
        mode = {"pipeline_mode": pl.Buffered(buffers)}
        pltpu.emit_pipeline(step, grid=grid, in_specs=[spec(**mode)], out_specs=spec())(
            x_ref, o_ref
        )

    assert len(grid) == rank
    return explored(body, shape, jnp.ones(shape), stock=stock)


def lane_by_lane(x, o):
    o[...] = jnp.exp(x[...]) * 2 + 1


def sum_of_all(x, o):
    o[...] = x[...] + jnp.sum(x[...])


def masked_sum(rows, block):
    def step(x, o):
        first = pl.program_id(0) * block[0]
        inside = first + lax.broadcasted_iota(jnp.int32, block, 0) < rows
        o[...] = x[...] + jnp.sum(jnp.where(inside, x[...], 0.0))

    return step


BUFFERS = [1, 2, 3]
SHAPES = [((20, LANES), (8, LANES)), ((40, LANES), (16, LANES)), ((16, 300), (8, 256))]


@pytest.mark.parametrize("stock", [False, True], ids=["native", "stock"])
@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_a_sum_over_the_padding_is_found_whatever_the_slot_held(shape, block, buffers, stock):
    report = piped(sum_of_all, shape, block, buffers=buffers, stock=stock)
    [finding] = report.findings
    assert finding.kind == "UninitialisedRead"
    assert "of the window of x_ref, which nobody has written" in finding.sentence
    assert "ends in an output" in finding.sentence
    check_told_in_words_of_blocks(finding, "x_ref", shape, block)


def check_told_in_words_of_blocks(finding, operand, shape, block):
    """The elements are those of a block, without the slot, and the advice is to mask them."""
    padding = next(axis for axis, size in enumerate(block) if shape[axis] % size)
    part = [f"0:{size}" for size in block]
    part[padding] = f"{shape[padding] % block[padding]}:{block[padding]}"
    index = f"[{', '.join(part)}]"
    assert f" reads {index} of the window of {operand}, " in finding.sentence
    plain = json.loads(json.dumps(finding.to_dict()))
    assert plain["indices"] == index
    assert plain["memory"]["parts"] == [index]
    assert tuple(plain["memory"]["shape"]) == block
    assert Finding.from_dict(plain) == finding
    mask, choose = finding.advice
    assert mask.startswith("mask the part of the last block that hangs over the end of ")
    assert "jnp.where" in mask
    assert "divides the extent" in choose
    assert repr(operand) in mask
    assert repr(operand) in choose
    assert "DMA" not in finding.text().partition("What to do:")[2]


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_what_is_computed_on_the_padding_and_dropped_is_clean(shape, block, buffers):
    report = piped(lane_by_lane, shape, block, buffers=buffers)
    assert report.is_clean, str(report)


@pytest.mark.parametrize("buffers", BUFFERS)
def test_a_sum_that_masks_the_padding_is_clean(buffers):
    block = (8, LANES)
    report = piped(masked_sum(20, block), (20, LANES), block, buffers=buffers)
    assert report.is_clean, str(report)


def test_exactly_the_elements_behind_the_end_are_named():
    [finding] = piped(sum_of_all, (20, LANES), (8, LANES), buffers=1).findings
    assert finding.memory.parts == ["[4:8, 0:128]"]
    [finding] = piped(sum_of_all, (40, LANES), (16, LANES), buffers=3).findings
    assert finding.memory.parts == ["[8:16, 0:128]"]


def test_a_window_that_is_filled_whole_again_is_defined_again():
    grid = (2, 3)

    def step(x, o):
        last = pl.program_id(1) == 2
        total = jnp.where(last, 0.0, jnp.sum(jnp.where(last, 0.0, x[...])))
        o[...] = x[...] + total

    spec = pl.BlockSpec((8, LANES), lambda i, j: (j, 0))

    def body(x_ref, o_ref):
        pltpu.emit_pipeline(step, grid=grid, in_specs=[spec], out_specs=spec)(x_ref, o_ref)

    report = explored(body, (20, LANES), jnp.ones((20, LANES)))
    assert report.is_clean, str(report)


@pytest.mark.parametrize("masks", [True, False])
def test_a_product_over_a_ragged_dimension_needs_a_mask(masks):
    rows, inner, block = 8, 300, 128

    def step(x, w, o):
        k = pl.program_id(0)
        left, right = x[...], w[...]
        if masks:
            limit = inner - k * block
            left = jnp.where(lax.broadcasted_iota(jnp.int32, left.shape, 1) < limit, left, 0)
            right = jnp.where(lax.broadcasted_iota(jnp.int32, right.shape, 0) < limit, right, 0)

        @pl.when(k == 0)
        def _begin():
            o[...] = jnp.zeros_like(o)

        o[...] += jnp.dot(left, right)

    def body(x_ref, w_ref, o_ref):
        pltpu.emit_pipeline(
            step,
            grid=(pl.cdiv(inner, block),),
            in_specs=[
                pl.BlockSpec((rows, block), lambda k: (0, k)),
                pl.BlockSpec((block, LANES), lambda k: (k, 0)),
            ],
            out_specs=pl.BlockSpec((rows, LANES), lambda k: (0, 0)),
        )(x_ref, w_ref, o_ref)

    report = explored(body, (rows, LANES), jnp.ones((rows, inner)), jnp.ones((inner, LANES)))
    if masks:
        assert report.is_clean, str(report)
    else:
        assert {finding.kind for finding in report.findings} == {"UninitialisedRead"}


@pytest.mark.parametrize("is_lane_by_lane", [True, False])
def test_of_a_window_that_is_input_and_output_the_rest_is_undefined_too(form, is_lane_by_lane):
    rows, spec = 20, pl.BlockSpec((8, LANES), lambda i: (i, 0))

    def step(x, o):
        o[...] = x[...] + (o[...] if is_lane_by_lane else jnp.sum(o[...]))

    def body(x_ref, w_ref, o_ref):
        run, allocate = pltpu.emit_pipeline_with_allocations(
            step, grid=(pl.cdiv(rows, 8),), in_specs=(spec,), out_specs=(spec,)
        )
        window, _ = allocate(x_ref, o_ref)
        total = pltpu.BufferedRef.input_output(spec, jnp.float32, grid_rank=1)
        pltpu.sync_copy(w_ref, o_ref)
        pl.run_scoped(lambda mine: run(x_ref, o_ref, allocations=mine), (window, total))

    x = jnp.ones((rows, LANES))
    report = explored(body, x.shape, x, x)
    if is_lane_by_lane:
        assert report.is_clean, str(report)
    else:
        [finding] = report.findings
        check_told_in_words_of_blocks(finding, "o_ref", (rows, LANES), (8, LANES))


@pytest.mark.parametrize("step", [lane_by_lane, sum_of_all])
def test_windows_of_one_dimension(step):
    report = piped(step, (2304,), (1024,))
    if step is lane_by_lane:
        assert report.is_clean, str(report)
    else:
        [finding] = report.findings
        check_told_in_words_of_blocks(finding, "x_ref", (2304,), (1024,))


@pytest.mark.parametrize("is_masked", [True, False])
def test_windows_of_a_vector_subcore(is_masked):
    size, block, width = 72, 32, 16

    def step(x, o):
        total = jnp.zeros((width,))
        for first in range(0, block, width):
            values = x[pl.ds(first, width)]
            if is_masked:
                place = pl.program_id(0) * block + first + lax.iota(jnp.int32, width)
                values = jnp.where(place < size, values, 0.0)
            total += values
        for first in range(0, block, width):
            o[pl.ds(first, width)] = total

    spec = pl.BlockSpec((block,), lambda i: (i,))

    def body(x_ref, o_ref):
        pltpu.emit_pipeline(
            step,
            grid=(pl.cdiv(size, block),),
            in_specs=[spec],
            out_specs=spec,
            tiling=pltpu.Tiling.SPARSE_CORE,
        )(x_ref, o_ref)

    with cokernel.target("tpu7x"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
        )
    report = explored(body, (size,), jnp.ones(size), mesh=mesh, chip="tpu7x")
    kinds = [finding.kind for finding in report.findings]
    assert kinds == ([] if is_masked else ["UninitialisedRead"]), str(report)
    if not is_masked:
        [finding] = report.findings
        assert finding.advice[0].startswith("mask the part of the last block")
