"""Kernels of several GPU programs, compiled for GPUs that are not there."""

import runpy

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cokernel
from cokernel import aot
from tests.aot import corpus, table

F32, F16 = jnp.float32, jnp.float16


@pytest.fixture(scope="module")
def reports(compiler_for):
    # Nothing has to be run where nothing can be compiled.
    for chip in table.GPUS:
        compiler_for(chip)
    return table.gpu_reports(corpus.collect_gpu(), compiler_for)


def test_what_the_interpreter_runs_compiles_for_hopper(reports):
    several = [case for case in reports if len(case.params["meshes"]) > 1]
    assert len(several) > 10
    for case in several:
        assert reports[case]["h100"].accepted, f"{case.source}: {reports[case]['h100']}"


def test_blackwell_refuses_only_the_instructions_of_hopper(reports):
    for case, by_chip in reports.items():
        if not by_chip["b200"].accepted:
            assert "'wgmma.fence' not supported" in by_chip["b200"].message, case.source


def test_the_page_says_what_the_compilers_say(reports):
    page = table.PAGE.read_text()
    assert table.page_with("GPUs", table.text(reports), page) == page, (
        "docs/platforms.md is out of date: run scripts/platforms.py GPUs"
    )


def example(name, kernel):
    return runpy.run_path(str(corpus.ROOT / "examples" / "gpu" / name))[kernel]


def matrix(size):
    return jax.ShapeDtypeStruct((size, size), F16)


def test_the_matrix_product_compiles_for_hopper_and_is_measured(compiler_for):
    report = aot.compile_with(
        compiler_for("h100"), example("matmul.py", "multiply"), matrix(256), matrix(256)
    )
    assert report.accepted, str(report)
    [registers] = report.registers
    assert 0 < registers.registers <= 255
    assert registers.spilled_bytes == 0
    assert registers.code_bytes > 1000
    assert [call.unit for call in report.calls] == ["GPU"]
    [shared] = [use for use in report.memory if use.memory == "shared memory of a block"]
    # Three arrays, and four barriers.
    assert shared.asked == 2 * (2 * 2 * 128 * 64 + 128 * 128) + 4 * 8
    assert report.code_bytes == registers.code_bytes
    assert report.hbm_bytes == 80_000_000_000
    assert report.compiler_bytes["argument_size"] == 2 * 2 * 256 * 256
    text = " ".join(str(report).split())
    assert f"HBM: arguments {2 * 2 * 256 * 256:,}, outputs" in text
    assert f"{registers.registers} registers a thread, 0 bytes spilled" in text


def test_blackwell_refuses_the_instructions_of_hopper(compiler_for):
    report = aot.compile_with(
        compiler_for("b200"), example("matmul.py", "multiply"), matrix(256), matrix(256)
    )
    assert not report.accepted
    assert report.message.startswith("ptxas: Instruction 'wgmma.fence' not supported")
    # The assembler says it for every line of its own.
    assert report.message.count("'wgmma.wait_group' not supported") == 1
    assert report.place.program == "multiply_tiles"


@pytest.mark.parametrize("chip", ["h100", "b200"])
def test_the_pipeline_of_three_programs_compiles(chip, compiler_for):
    types = jax.ShapeDtypeStruct((6, 256), F32)
    report = aot.compile_with(compiler_for(chip), example("pipeline.py", "softplus"), types)
    assert report.accepted, str(report)


def two_programs(consume, room=256):
    def produce(x_ref, o_ref, tile, full):
        plgpu.copy_gmem_to_smem(x_ref, tile.at[pl.ds(0, 256)], full)

    return cokernel.mpmd_map(
        [
            (plgpu.Mesh(num_threads=1, thread_name="producer"), produce),
            (plgpu.Mesh(num_threads=1, thread_name="consumer"), consume),
        ],
        jax.ShapeDtypeStruct((256,), F32),
        scratch_types=[plgpu.SMEM((room,), F32), plgpu.Barrier()],
    )


def test_a_planted_error_is_refused_at_its_line(compiler_for, line_of):
    def consume(x_ref, o_ref, tile, full):
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile, o_ref.at[pl.ds(0, 128)])

    report = aot.compile_with(
        compiler_for("h100"), two_programs(consume), jax.ShapeDtypeStruct((256,), F32)
    )
    assert not report.accepted
    assert report.place.line == line_of(consume, "copy_smem_to_gmem")


def test_a_kernel_that_was_compiled_before_is_measured_again(compiler_for):
    def consume(x_ref, o_ref, tile, full):
        plgpu.barrier_wait(full)
        o_ref[...] = tile[...]

    kernel = two_programs(consume)
    reports = [
        aot.compile_with(compiler_for("h100"), function, jax.ShapeDtypeStruct((256,), F32))
        for function in (kernel, kernel, lambda x: kernel(kernel(x)))
    ]
    for report in reports:
        assert {registers.kernel for registers in report.registers} == {"produce_and_consume"}
        assert all(registers.code_bytes > 100 for registers in report.registers)


def test_shared_memory_that_is_not_there_is_refused_by_name(compiler_for):
    def consume(x_ref, o_ref, tile, full):
        plgpu.barrier_wait(full)

    kernel = two_programs(consume, room=100_000)
    report = aot.compile_with(compiler_for("h100"), kernel, jax.ShapeDtypeStruct((256,), F32))
    assert not report.accepted
    assert [use.largest for use in report.memory if use.exceeds] == ["tile: float32[100000]"]
