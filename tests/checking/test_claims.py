"""What a loop claims is found, counted and told as if each access had been told by itself."""

import contextlib

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _runtime
from cokernel.checking.launches import collected_reports

SIZE = 64
WIDTH = 4
X = jnp.arange(SIZE, dtype=jnp.float32)
VMEM = pltpu.VMEM((SIZE,), jnp.float32)
SHARED = pltpu.VMEM_SHARED((SIZE,), jnp.float32)

# How many accesses each report is of that have been claimed.
CLAIMED = []


@contextlib.contextmanager
def claims(are_taken):
    before = _runtime.set_claims(are_taken)
    try:
        yield
    finally:
        _runtime.set_claims(before)


def kernel_of(body, *scratch, cores=1):
    return cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((SIZE,), jnp.float32),
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=list(scratch),
    )


def report_of(kernel, *operands, schedules=2, is_claimed=None):
    """The report of a kernel, which must be the same with and without claims. `is_claimed`:
    whether some loop must, or must not, claim something.
    """
    taken, claimed = told_of(kernel, *operands, schedules=schedules, are_taken=True)
    refused, none = told_of(kernel, *operands, schedules=schedules, are_taken=False)
    assert taken.to_dict() == refused.to_dict()
    assert none == 0
    CLAIMED.append(claimed)
    assert is_claimed is None or bool(claimed) == is_claimed
    return taken


def told_of(kernel, *operands, schedules, are_taken):
    """The report, and how many accesses have been claimed."""
    with claims(are_taken), collected_reports() as heard:
        report = cokernel.explore(kernel, *operands, schedules=schedules)
    return report, sum(record["claimed"] for _, record in heard)


def finding_of(kernel, *operands, schedules=1, is_claimed=None):
    """The only finding but those of outputs that nobody has written."""
    report = report_of(kernel, *operands, schedules=schedules, is_claimed=is_claimed)
    findings = report.findings
    [finding] = [finding for finding in findings if finding.name != "out_ref"]
    return finding


def lanes(i):
    return pl.ds(i * WIDTH, WIDTH)


def fill(ref):
    ref[...] = jnp.ones(ref.shape)


@pytest.mark.parametrize("bad", [0, 31, SIZE - 1])
def test_one_undefined_element_among_those_that_a_loop_reads_is_named(bad):
    def body(x_ref, out_ref, mine):
        @pl.loop(0, SIZE)
        def _fill(i):
            @pl.when(i != bad)
            def _write():
                mine[i] = 1.0

        @pl.loop(0, SIZE // WIDTH)
        def _step(i):
            out_ref[lanes(i)] = mine[lanes(i)] + x_ref[lanes(i)]

    finding = finding_of(kernel_of(body, VMEM), X, is_claimed=False)
    assert (finding.kind, finding.name) == ("UninitialisedRead", "mine")
    assert finding.indices == f"[{bad}]"
    assert finding.occurrences == 1


@pytest.mark.parametrize("at", [0, 30, SIZE - 1])
def test_a_race_with_one_element_of_those_that_a_loop_writes_is_named(at):
    def body(x_ref, out_ref, shared):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _all():
            @pl.loop(0, SIZE // WIDTH)
            def _step(i):
                shared[lanes(i)] = x_ref[lanes(i)]

        @pl.when(core == 1)
        def _one():
            shared[at] = 5.0

    for schedules in (1, 4):
        finding = finding_of(kernel_of(body, SHARED, cores=2), X, schedules=schedules)
        assert (finding.kind, finding.name, finding.indices) == ("Race", "shared", f"[{at}]")
        assert finding.occurrences == schedules
        codes = {party.code for party in finding.parties}
        assert codes == {"shared[lanes(i)] = x_ref[lanes(i)]", "shared[at] = 5.0"}


def test_a_race_with_a_strided_part_names_its_elements():
    def body(x_ref, out_ref, shared):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _even():
            @pl.loop(0, SIZE // 2)
            def _step(i):
                shared[2 * i] = x_ref[i]

        @pl.when(core == 1)
        def _all():
            @pl.loop(8, 16)
            def _step(i):
                shared[i] = 5.0

    kernel = kernel_of(body, SHARED, cores=2)
    finding = finding_of(kernel, X, schedules=3, is_claimed=True)
    assert finding.kind == "Race"
    assert finding.memory.parts == [f"[{i}]" for i in range(8, 16, 2)]
    assert finding.occurrences == 4 * 3


def test_a_race_with_the_columns_of_a_block_names_its_elements():
    def body(x_ref, out_ref, shared):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _columns():
            @pl.loop(0, 4)
            def _step(i):
                shared[:, pl.ds(2 * i, 2)] = jnp.ones((8, 2))

        @pl.when(core == 1)
        def _row():
            shared[3, 4:6] = jnp.zeros(2)

    shared = pltpu.VMEM_SHARED((8, 8), jnp.float32)
    finding = finding_of(kernel_of(body, shared, cores=2), X, schedules=3, is_claimed=True)
    assert (finding.kind, finding.indices) == ("Race", "[3, 4:6]")


@pytest.mark.parametrize("trips", [SIZE // WIDTH + 1, 100])
def test_the_iteration_that_leaves_the_ref_is_told_and_those_before_it_have_been_run(trips):
    def body(x_ref, n_ref, out_ref, mine):
        fill(mine)

        @pl.loop(0, n_ref[0])
        def _step(i):
            out_ref[lanes(i)] = mine[lanes(i)] + 1.0

    kernel = kernel_of(body, VMEM)
    report = report_of(kernel, X, jnp.array([trips]), schedules=1, is_claimed=False)
    assert [finding.kind for finding in report.findings] == ["OutOfBounds"]
    # The index check comes first, then the read and the write of each iteration in front.
    assert report.counts["accesses"] == 2 + 2 * SIZE // WIDTH


def test_a_column_that_leaves_its_row_is_not_taken_for_one_of_the_next():
    def body(x_ref, n_ref, out_ref, mine):
        mine[...] = jnp.ones((8, 8))

        @pl.loop(0, n_ref[0])
        def _step(i):
            out_ref[i] = mine[2, i]

    mine = pltpu.VMEM((8, 8), jnp.float32)
    report = report_of(kernel_of(body, mine), X, jnp.array([9]), schedules=1)
    assert [finding.kind for finding in report.findings] == ["OutOfBounds"]


@pytest.mark.parametrize("trips", [0, -3])
def test_a_loop_that_is_not_run_accesses_nothing(trips):
    def body(x_ref, n_ref, out_ref, mine):
        out_ref[...] = x_ref[...]

        @pl.loop(0, n_ref[0])
        def _step(i):
            out_ref[lanes(i)] = mine[lanes(i)]

    report = report_of(kernel_of(body, VMEM), X, jnp.array([trips]), schedules=1)
    assert report.is_clean
    assert report.counts["accesses"] == 3


def test_a_clean_loop_over_single_elements_is_claimed_whatever_its_bounds():
    def body(x_ref, n_ref, out_ref, mine):
        fill(mine)
        low, high = n_ref[0], n_ref[1]
        out_ref[...] = x_ref[...]

        @pl.loop(low, high, step=3)
        def _step(i):
            mine[i] = mine[SIZE - 1 - i] * x_ref[i] + 1.0

        def carry(i, total):
            out_ref[i] = x_ref[i] + 1.0
            return total + mine[i]

        out_ref[0] = lax.fori_loop(low, high, carry, 0.0)

    report = report_of(kernel_of(body, VMEM), X, jnp.array([7, 28]), is_claimed=True)
    assert report.is_clean


def test_two_names_of_the_same_memory_are_not_taken_for_two_refs():
    def body(x_ref, out_ref, mine):
        mine[0] = 1.0
        other = mine.at[pl.ds(1, SIZE - 1)]

        @pl.loop(0, SIZE - 1)
        def _step(i):
            # What is written here is what the next iteration reads.
            other[i] = mine[i] + 1.0

        out_ref[...] = mine[...]

    assert report_of(kernel_of(body, VMEM), X, is_claimed=False).is_clean


def test_an_output_that_overwrites_an_operand_is_the_operand():
    def body(x_ref, out_ref):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _read():
            @pl.loop(0, SIZE // WIDTH)
            def _step(i):
                x_ref[lanes(i)] = x_ref[lanes(i)] + 1.0

        @pl.when(core == 1)
        def _write():
            out_ref[7] = 1.0

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((SIZE,), jnp.float32),
        mesh=cokernel.CoreMesh(core=2),
        input_output_aliases={0: 0},
    )
    findings = report_of(kernel, X, schedules=3).findings
    assert {finding.kind for finding in findings} == {"Race"}
    assert {finding.indices for finding in findings} == {"[7]"}


def test_a_read_behind_the_write_of_the_same_iteration_sees_what_was_undefined_in_it():
    def body(x_ref, out_ref, source, middle):
        source[0:8] = jnp.ones(8)

        @pl.loop(0, SIZE // WIDTH)
        def _step(i):
            middle[lanes(i)] = source[lanes(i)]
            out_ref[lanes(i)] = middle[lanes(i)]

    finding = finding_of(kernel_of(body, VMEM, VMEM), X)
    assert (finding.name, finding.indices) == ("source", f"[8:{SIZE}]")


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_sum_is_undefined_from_the_iteration_on_that_adds_an_undefined_value(is_left_out):
    def body(x_ref, out_ref, source, total):
        source[0:20] = jnp.ones(20)
        source[20 + is_left_out :] = jnp.ones(SIZE - 20 - is_left_out)
        total[...] = jnp.zeros(WIDTH)

        @pl.loop(0, SIZE // WIDTH)
        def _step(i):
            total[...] = total[...] + source[lanes(i)]

        out_ref[...] = x_ref[...]
        out_ref[0:WIDTH] = total[...]

    kernel = kernel_of(body, VMEM, pltpu.VMEM((WIDTH,), jnp.float32))
    # What is summed up is claimed if it is all there, the sum is not.
    report = report_of(kernel, X, is_claimed=None if is_left_out else True)
    expected = [("UninitialisedRead", "source", "[20]")] * is_left_out
    assert [(one.kind, one.name, one.indices) for one in report.findings] == expected


@pytest.mark.parametrize("is_inner", [True, False])
def test_the_access_that_only_some_iterations_make_is_told_by_them(is_inner):
    def body(x_ref, out_ref, mine):
        mine[0:32] = jnp.ones(32)
        out_ref[...] = x_ref[...]

        @pl.loop(0, SIZE // WIDTH)
        def _step(i):
            out_ref[lanes(i)] = x_ref[lanes(i)] * 2

            @pl.when((i >= 4) & (i < 9) if is_inner else i < 8)
            def _some():
                out_ref[lanes(i)] = mine[lanes(i)]

    report = report_of(kernel_of(body, VMEM), X, schedules=1, is_claimed=True)
    assert [finding.indices for finding in report.findings] == ["[32:36]"] * is_inner


def test_loops_in_loops_find_what_single_accesses_find():
    def body(x_ref, out_ref, mine):
        mine[0:7, :] = jnp.ones((7, 8))
        mine[7, 0:6] = jnp.ones(6)

        @pl.loop(0, 8)
        def _row(i):
            @pl.loop(0, 8)
            def _column(j):
                out_ref[i * 8 + j] = mine[i, j]

    mine = pltpu.VMEM((8, 8), jnp.float32)
    finding = finding_of(kernel_of(body, mine), X, is_claimed=True)
    assert (finding.name, finding.indices) == ("mine", "[7, 6:8]")
    assert finding.occurrences == 2


def test_the_last_of_the_reads_that_touch_an_element_is_the_one_that_a_race_names():
    def body(x_ref, out_ref, shared):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _read():
            @pl.loop(0, SIZE - 1)
            def _step(i):
                left = shared[i]
                right = shared[i + 1]
                out_ref[i] = left + right

        @pl.when(core == 1)
        def _write():
            shared[10] = 1.0

    finding = report_of(kernel_of(body, SHARED, cores=2), X, schedules=6).findings[0]
    assert finding.kind == "Race"


def test_who_polls_a_flag_does_not_see_what_the_writer_does_in_the_loop_afterwards():
    def body(x_ref, out_ref, flag, data, begun):
        core = lax.axis_index("core")
        out_ref[...] = x_ref[...]

        @pl.when(core == 0)
        def _begin():
            flag[...] = jnp.zeros(8, jnp.int32)
            for other in range(2):
                pl.semaphore_signal(begun, device_id={"core": other})

        pl.semaphore_wait(begun)

        @pl.when(core == 0)
        def _writer():
            @pl.loop(0, 8)
            def _step(i):
                data[i] = 1.0
                flag[i] = 1

        @pl.when(core == 1)
        def _reader():
            lax.while_loop(lambda f: f == 0, lambda f: flag[3], 0)
            out_ref[0:2] = data[3:5]

    kernel = kernel_of(
        body,
        pltpu.VMEM_SHARED((8,), jnp.int32),
        pltpu.VMEM_SHARED((8,), jnp.float32),
        pltpu.SemaphoreType.REGULAR,
        cores=2,
    )
    findings = report_of(kernel, X, schedules=20).findings
    races = [(one.kind, one.indices) for one in findings if one.name == "data"]
    # What was written before the flag is ordered by it.
    assert races == [("Race", "[4]")]


def test_the_parallel_loop_of_a_subcore_claims_what_it_reads_and_writes():
    def body(x_ref, out_ref, mine):
        pltpu.sync_copy(x_ref, mine)

        @plsc.parallel_loop(0, SIZE, step=16)
        def _step(i):
            mine[pl.ds(i, 16)] = mine[pl.ds(i, 16)] * 2

        pltpu.sync_copy(mine, out_ref)

    with cokernel.target("v6e"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
        )
        kernel = cokernel.kernel(
            body, jax.ShapeDtypeStruct((SIZE,), jnp.float32), mesh=mesh, scratch_types=[VMEM]
        )
        assert report_of(kernel, X, is_claimed=True).is_clean


# Random loops.

REFS = ("x", "out", "mine", "other")


@st.composite
def accesses(draw):
    """(Ref, first element, step)."""
    step = draw(st.sampled_from([WIDTH] * 8 + [1, 2, 8, 0, -WIDTH]))
    first = draw(st.sampled_from([0] * 8 + [WIDTH, 8, 1, 9]))
    return draw(st.sampled_from(REFS)), first + (32 if step < 0 else 0), step


@st.composite
def statements(draw):
    """What one statement of a loop does."""
    kind = draw(st.sampled_from(["copy"] * 5 + ["carry", "carry", "sum", "if", "pick"]))
    target = draw(accesses().filter(lambda access: access[0] != "x"))
    return kind, target, draw(accesses()), draw(st.integers(0, 5))


loops = st.tuples(
    st.sampled_from(["fori", "fori", "dynamic", "loop", "nested"]),
    st.sampled_from([8, 11, 5, 4, 15, 1, 0]),
    st.lists(statements(), min_size=1, max_size=3),
)
programs = st.tuples(
    # How many eighths of the scratch Refs are written first.
    st.lists(st.sampled_from([0, 5, 8, 8, 8]), min_size=2, max_size=2),
    st.lists(loops, min_size=1, max_size=3),
    # What the second core does, if there is one.
    st.none() | st.none() | loops,
)


def part(access, i):
    _, first, step = access
    return pl.ds(first + step * i, WIDTH)


def one_statement(refs, statement, i, total):
    kind, target, source, number = statement
    to, come = refs[target[0]], refs[source[0]]
    if kind == "copy":
        to[part(target, i)] = come[part(source, i)] + 1.0
    elif kind == "sum":
        to[part(target, i)] = to[part(target, i)] + come[part(source, i)]
    elif kind == "pick":
        to[part(target, i)] = come[(i * 7 + jnp.arange(WIDTH)) % SIZE]
    elif kind == "carry":
        total = total + come[part(source, i)]
    else:

        @pl.when(i == number)
        def _some():
            to[part(target, i)] = come[part(source, i)] * 2.0

    return total


def run_loop(refs, loop, zero):
    form, trips, inside = loop

    def step(i, total):
        for statement in inside:
            total = one_statement(refs, statement, i, total)
        return total

    start = jnp.zeros(WIDTH)
    if form == "dynamic":
        refs["out"][0:WIDTH] = lax.fori_loop(0, zero + trips, step, start)
    elif form == "nested":

        def outer(j, total):
            return lax.fori_loop(0, trips, lambda i, total: step(i + j, total), total)

        refs["out"][0:WIDTH] = lax.fori_loop(0, 2, outer, start)
    elif form == "loop":

        @pl.loop(0, trips)
        def _step(i):
            step(i, start)

    else:
        refs["out"][0:WIDTH] = lax.fori_loop(0, trips, step, start)


def test_random_loops_are_told_of_as_if_nothing_had_been_claimed():
    tally = []

    @hypothesis.settings(
        max_examples=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    @hypothesis.given(programs)
    def check(program):
        known, inside, others = program

        def body(x_ref, zero_ref, out_ref, mine, other):
            core = lax.axis_index("core")
            refs = {"x": x_ref, "out": out_ref, "mine": mine, "other": other}

            @pl.when(core == 0)
            def _first():
                for ref, eighths in zip((mine, other), known, strict=True):
                    if eighths:
                        ref[0 : 8 * eighths] = jnp.ones(8 * eighths)
                for loop in inside:
                    run_loop(refs, loop, zero_ref[0])

            if others is not None:

                @pl.when(core == 1)
                def _second():
                    run_loop(refs, others, zero_ref[0])

        cores = 1 if others is None else 2
        kernel = kernel_of(body, VMEM, SHARED, cores=cores)
        tally.append(report_of(kernel, X, jnp.zeros(1, jnp.int32)))

    before = len(CLAIMED)
    check()
    # It would say little if hardly anything were claimed.
    claimed = sum(map(bool, CLAIMED[before:]))
    assert claimed > len(tally) // 8
    assert any(told.findings and here for told, here in zip(tally, CLAIMED[before:], strict=True))
