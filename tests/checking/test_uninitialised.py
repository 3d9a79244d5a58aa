"""A value that nobody wrote is told by the Ref and the elements that it was read from."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

PARTS_OF_A_COPY = ("source", "target", "semaphore")


def finding_of(body, scratch, *inputs, out=(8,)):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(out, jnp.float32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=scratch,
    )
    report = cokernel.explore(kernel, *inputs, schedules=1)
    [finding] = report.findings
    assert finding.kind == "UninitialisedRead", str(report)
    return finding


def test_the_ref_is_named_that_decided_and_not_the_one_that_was_read_last():
    def body(out_ref, first, second):
        decides = first[3]
        second[4:] = jnp.zeros(4)
        unused = second[...]  # Undefined in part, and of no consequence.
        second[...] = unused
        out_ref[...] = jnp.zeros(8)

        @pl.when(decides > 0)
        def _one():
            out_ref[...] = jnp.ones(8)

    finding = finding_of(body, [pltpu.VMEM((8,), jnp.float32)] * 2)
    assert (finding.name, finding.indices) == ("first", "[3]")
    assert finding.parties[0].code == "decides = first[3]"


def test_of_what_a_line_reads_only_the_undefined_elements_are_named():
    def body(out_ref, a, b):
        a[...] = jnp.ones(8)
        b[0:3] = jnp.ones(3)
        b[5] = 1.0
        out_ref[...] = a[...] + b[...]

    finding = finding_of(body, [pltpu.VMEM((8,), jnp.float32)] * 2)
    assert finding.name == "b"
    assert finding.memory.parts == ["[3:5]", "[6:8]"]


def test_a_value_that_a_loop_carries_is_told_with_its_own_read():
    def body(out_ref, start, other):
        def step(i, carry):
            total, seen = carry
            return total + 1.0, seen + other[i]

        total, seen = lax.fori_loop(0, 4, step, (start[1], 0.0))
        other[...] = jnp.full(8, seen)
        out_ref[...] = jnp.full(8, total)

    finding = finding_of(body, [pltpu.VMEM((8,), jnp.float32)] * 2)
    assert (finding.name, finding.indices) == ("start", "[1]")


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_column_of_a_copied_block_is_named_at_its_source(is_whole):
    def body(out_ref, source, target, sem):
        source[:, 0:6] = jnp.ones((4, 6))
        copy = pltpu.make_async_copy(source, target, sem)
        copy.start()
        copy.wait()
        out_ref[...] = jnp.sum(target[...], axis=1) if is_whole else target[:, 6]

    block = pltpu.VMEM((4, 8), jnp.float32)
    finding = finding_of(body, [block, block, pltpu.SemaphoreType.DMA], out=(4,))
    assert finding.name == "source"
    assert finding.memory.parts == ["[0:4, 6:8]" if is_whole else "[0:4, 6]"]


def staged(body, scratch=(), chip="tpu7x"):
    with cokernel.target(chip):
        size = pltpu.get_tpu_info().mxu_column_size
        kernel = cokernel.kernel(
            functools.partial(body, size),
            jax.ShapeDtypeStruct((8, size), jnp.float32),
            mesh=cokernel.CoreMesh(core=1),
            scratch_types=[
                pltpu.VMEM((size, size), jnp.float32),
                pltpu.VMEM((8, size), jnp.float32),
                *(make(size) for make in scratch),
            ],
        )
        options = cokernel.Checked(chip_limits="off")
        return cokernel.explore(kernel, schedules=1, options=options)


@pytest.mark.parametrize("transpose", [False, True])
def test_an_undefined_weight_makes_its_column_of_the_product_undefined(transpose):
    def body(size, out_ref, weights, left, acc):
        weights[...] = jnp.ones((size, size))
        left[...] = jnp.ones((8, size))

        def scoped(row):
            weights[3] = row[...]
            pltpu.matmul_push_rhs(weights[...], 0, 0, transpose=transpose)
            pltpu.matmul_acc_lhs(acc, left[...], load_staged_rhs=0)
            result = pltpu.matmul_pop(acc)
            if transpose:
                # Row 3 of the weights is column 3 of what is multiplied with.
                result = result.at[:, 3].set(0.0)
            out_ref[...] = result

        pl.run_scoped(scoped, pltpu.VMEM((size,), jnp.float32))

    report = staged(body, [lambda size: pltpu.ACC(0)((8, size), jnp.float32)])
    if transpose:
        assert not report.findings, str(report)
    else:
        [finding] = report.of_kind("UninitialisedRead")
        assert finding.name == "row"


def test_weights_that_are_pushed_too_late_are_found():
    def body(size, out_ref, weights, left, acc):
        weights[...] = jnp.ones((size, size))
        left[...] = jnp.ones((8, size))

        @pl.loop(0, 2)
        def _step(i):
            @pl.when(i > 0)
            def _late():
                pltpu.matmul_push_rhs(weights[...], 0, 0)

            pltpu.matmul_acc_lhs(acc, left[...], load_staged_rhs=0)

        out_ref[...] = pltpu.matmul_pop(acc)

    report = staged(body, [lambda size: pltpu.ACC(0)((8, size), jnp.float32)])
    assert report.of_kind("UninitialisedRead"), str(report)


@pytest.mark.parametrize("broken", [True, False])
def test_undefined_values_are_followed_through_a_queue_of_results(broken):
    def body(size, out_ref, weights, left):
        weights[...] = jnp.ones((size, size))
        left[0:4] = jnp.ones((4, size))
        if not broken:
            left[4:8] = jnp.ones((4, size))
        pltpu.matmul_push_rhs(weights[...], 0, 0)
        pltpu.matmul_lhs_fifo(left[...], 0, load_staged_rhs=0)
        out_ref[...] = pltpu.matmul_pop_fifo((8, size), jnp.float32, 0)

    report = staged(body, chip="v6e")
    if broken:
        [finding] = report.of_kind("UninitialisedRead")
        assert (finding.name, finding.indices[:4]) == ("left", "[4:8")
    else:
        assert not report.findings, str(report)


@pytest.mark.parametrize("scatters", [False, True])
def test_undefined_indices_are_told_with_the_bad_index_that_they_are(scatters):
    def body(x_ref, out_ref, values, indices):
        pltpu.sync_copy(x_ref, values)
        if scatters:
            plsc.store_scatter(values, [indices[...]], values[...])
        else:
            values[...] = plsc.load_gather(values, [indices[...]])
        pltpu.sync_copy(values, out_ref)

    with cokernel.target("tpu7x"):
        kernel = cokernel.kernel(
            body,
            jax.ShapeDtypeStruct((16,), jnp.float32),
            mesh=plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
            ),
            scratch_types=[pltpu.VMEM((16,), jnp.float32), pltpu.VMEM((16,), jnp.int32)],
        )
        report = cokernel.explore(kernel, jnp.ones(16), schedules=1)
    [finding] = report.findings
    assert (finding.name, finding.indices) == ("indices", "[0:16]")
    assert [one.kind for one in finding.consequences] == ["OutOfBounds"]


@pytest.mark.parametrize("part", PARTS_OF_A_COPY)
def test_an_undefined_index_of_a_copy_is_told_where_the_copy_starts(part):
    def body(x_ref, o_ref, mine, sems):
        o_ref[...] = x_ref[...]
        number = mine[0] & 0
        source, target, sem = (number if name == part else 0 for name in PARTS_OF_A_COPY)
        pltpu.make_async_copy(x_ref.at[source], o_ref.at[target], sems.at[sem]).start()
        pltpu.make_async_copy(x_ref.at[0], o_ref.at[0], sems.at[0]).wait()

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2, 8), jnp.float32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[cokernel.private((4,), jnp.int32), pltpu.SemaphoreType.DMA((1,))],
        interpret=cokernel.Checked(),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="is used as an index"):
        jax.block_until_ready(kernel(jnp.ones((2, 8))))
    [finding] = cokernel.last_report().findings
    assert (finding.kind, finding.name) == ("UninitialisedRead", "mine")


def test_of_scoped_memory_the_line_that_asks_for_it_is_told():
    def body(out_ref):
        def scope(own):
            own[0:4] = jnp.ones(4)
            out_ref[...] = own[...]

        pl.run_scoped(scope, pltpu.VMEM((8,), jnp.float32))

    finding = finding_of(body, [])
    assert [party.action for party in finding.parties] == ["reads", "writes", "allocates"]
    assert finding.parties[2].code.startswith("pl.run_scoped(scope")
