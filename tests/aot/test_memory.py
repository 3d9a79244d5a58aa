"""What kernels ask of each memory, and that a compiler's limits are those that reports name."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import aot
from cokernel.aot import memory

I32, F32 = jnp.int32, jnp.float32
VECTOR = jax.ShapeDtypeStruct((16,), I32)


def meshes(chip):
    with cokernel.target(chip):
        return {
            "vector": plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=1
            ),
            "scalar": plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1),
            "tensor": pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1),
        }


def uses(kernel, *args, chip):
    """Returns what each kernel of a function asks, by memory."""
    jaxpr = jax.jit(kernel).trace(*args).jaxpr
    budget = aot.TARGETS[chip].memory_budget()
    found = [use for eqn in memory.kernels(jaxpr) for use in memory.memory_uses(eqn, budget)]
    return {use.memory: use for use in found}


def test_shared_memory_and_that_of_each_subcore_are_one_memory():
    mesh = meshes("v6e")["vector"]

    def body(x_ref, o_ref, shared, own):
        pltpu.sync_copy(x_ref, own.at[pl.ds(0, 16)])

    kernel = cokernel.kernel(
        body,
        VECTOR,
        mesh=mesh,
        scratch_types=[pltpu.VMEM_SHARED((600_000,), I32), pltpu.VMEM((40_000,), I32)],
    )
    found = uses(kernel, VECTOR, chip="v6e")
    assert not found["shared memory of a SparseCore"].exceeds
    assert not found["VMEM of a vector subcore"].exceeds
    both = found["shared memory and VMEM of a SparseCore"]
    assert both.asked == 4 * (600_000 + 16 * 40_000)
    assert both.exceeds
    assert both.largest == "shared: int32[600000]"


def test_semaphores_and_narrow_numbers_are_counted():
    mesh = meshes("v6e")["vector"]
    kernel = cokernel.kernel(
        lambda x_ref, o_ref, many, small: None,
        VECTOR,
        mesh=mesh,
        scratch_types=[pltpu.SemaphoreType.REGULAR((40,)), pltpu.VMEM((3,), jnp.int4)],
        name="k",
    )
    found = uses(kernel, VECTOR, chip="v6e")
    semaphores = found["semaphores of a vector subcore"]
    assert (semaphores.asked, semaphores.exceeds) == (40, True)
    # Three numbers of half a byte.
    assert found["VMEM of a vector subcore"].asked == 2


def test_what_a_program_allocates_is_described_with_its_line(line_of):
    mesh = meshes("v6e")["tensor"]

    def body(x_ref, o_ref):
        pl.run_scoped(lambda one: None, pltpu.VMEM((16,), F32))
        pl.run_scoped(lambda many: None, pltpu.VMEM((64,), F32))

    found = uses(cokernel.kernel(body, VECTOR, mesh=mesh), VECTOR, chip="v6e")
    use = found["VMEM of a TensorCore"]
    # The second is allocated when the first is gone.
    assert use.asked == 4 * 64
    assert use.largest == f"run_scoped at {line_of(body, '(lambda many')}: float32[64]"


def test_memories_of_a_gpu_have_their_own_budgets():
    def accumulates(o_ref, barriers):
        pl.run_scoped(lambda sums: None, plgpu.ACC((64, 128), F32))

    def allocates(name):
        def body(o_ref, barriers):
            @pl.loop(0, 2)
            def _step(_):
                pl.run_scoped(lambda mine: None, plgpu.SMEM((256,), F32), collective_axes=name)
                pl.run_scoped(lambda mine: None, plgpu.TMEM((128, 64), F32), collective_axes=name)

            accumulates(o_ref, barriers)

        return plgpu.Mesh(num_threads=1, thread_name=name), body

    kernel = cokernel.mpmd_map(
        [allocates("first"), allocates("second")],
        VECTOR,
        scratch_types=[plgpu.Barrier(num_barriers=3)],
    )
    found = uses(kernel, chip="h100")
    # What both allocate is there at the same time, but registers are each program's own.
    assert found["shared memory of a block"].asked == 2 * 4 * 256 + 3 * 8
    assert found["registers of a warpgroup"].asked == 4 * 64 * 128
    assert found["TMEM"].asked == 2 * 4 * 128 * 64
    assert found["TMEM"].exceeds
    assert not uses(kernel, chip="b200")["TMEM"].exceeds


def asks_for(kind, words, chip):
    """Returns a kernel that uses so many words of a memory that only the compiler knows the size
    of."""
    mesh = meshes(chip)["scalar" if kind == "scalar" else "vector"]
    scratch = {
        "shared": pltpu.VMEM_SHARED((words,), I32),
        "scalar": pltpu.SMEM((words,), I32),
        "semaphores": pltpu.SemaphoreType.REGULAR((words,)),
        "vector": pltpu.SMEM((words,), I32),
    }[kind]

    def body(x_ref, o_ref, memory, row):
        if kind == "semaphores":
            pl.semaphore_signal(memory.at[lax.axis_index("core")], 1)
            pltpu.sync_copy(x_ref, o_ref)
            return
        if kind == "vector":

            @pl.loop(0, words)
            def _fill(word):
                memory[word] = word + lax.axis_index("subcore")

            @pl.loop(0, words)
            def _read(word):
                @pl.when(memory[word] > 3)
                def _copy():
                    pltpu.sync_copy(x_ref, row)

            pltpu.sync_copy(row, o_ref)
            return
        pltpu.sync_copy(x_ref, memory.at[pl.ds(words - 16, 16)])
        pltpu.sync_copy(memory.at[pl.ds(0, 16)], o_ref)

    row = pltpu.SMEM((16,), I32) if kind == "scalar" else pltpu.VMEM((16,), I32)
    return cokernel.kernel(body, VECTOR, mesh=mesh, scratch_types=[scratch, row])


LIMITS = [
    ("shared", "shared memory of a SparseCore", 4),
    ("scalar", "SMEM of a scalar subcore", 4),
    ("vector", "SMEM of a vector subcore", 4),
    ("semaphores", "semaphores of a vector subcore", 1),
]


@pytest.mark.parametrize(("kind", "name", "unit"), LIMITS)
def test_the_budget_of_a_sparse_core_is_the_compilers(tpu, kind, name, unit):
    budget = tpu.target.memory_budget()[name] // unit
    report = aot.compile_with(tpu, asks_for(kind, budget * 2, tpu.target.name), VECTOR)
    assert not report.accepted
    assert name in [use.memory for use in report.memory if use.exceeds]
    # The last word that may be used is named, or the first that may not; of a scalar subcore's
    # memory the compiler takes some itself.
    own = 100 if kind == "scalar" else 1
    [limit] = re.findall(r"(?:bound|limit) \((\d+)(?: words)?\)", report.message)[-1:]
    assert budget - own <= int(limit) <= budget
