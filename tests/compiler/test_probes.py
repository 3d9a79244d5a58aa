"""Checked mode tells the runtime of every access to a Ref, and native code has nothing of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _jax
from cokernel.checking.options import Checked
from tests.compiler.checked_harness import accesses, calls, compile_kernel

X = jnp.arange(64, dtype=jnp.int32)
LANES = 8


def vector_kernel(body, *scratch):
    """A kernel of one vector subcore: body(x_ref, o_ref, *scratch), the first two in HBM."""
    with cokernel.target("v6e"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1
        )
        return cokernel.kernel(body, X, mesh=mesh, scratch_types=list(scratch))


def plain_kernel(body, *scratch, cores=1):
    mesh = cokernel.CoreMesh(core=cores)
    return cokernel.kernel(body, X, mesh=mesh, scratch_types=list(scratch))


def chip_kernel(body, *scratch):
    with cokernel.target("v6e"):
        return plain_kernel(body, *scratch)


VMEM = pltpu.VMEM((64,), jnp.int32)
SHARED = pltpu.VMEM_SHARED((64,), jnp.int32)
SMEM = pltpu.SMEM((4,), jnp.int32)


def get_and_set(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def set_a_part(x_ref, o_ref):
    o_ref[pl.ds(x_ref[3], 2)] = x_ref[pl.ds(1, 2)]


def exchange(x_ref, o_ref, mine):
    o_ref[0] = mine[0]
    o_ref[...] = jax.ref.swap(mine, ..., x_ref[...])


def add_in_place(x_ref, o_ref):
    jax.ref.addupdate(o_ref, ..., x_ref[...])


def index_arrays(x_ref, o_ref):
    o_ref[jnp.arange(8) * 2] = x_ref[jnp.arange(8)]


def index_arrays_in_refs(x_ref, o_ref, rows):
    o_ref[rows[...]] = x_ref[rows[...]]


def masked(x_ref, o_ref, mine):
    mask = jnp.arange(8) < 3
    value = pltpu.load(x_ref.at[pl.ds(x_ref[0], 8)], mask=mask)
    pltpu.store(mine.at[pl.ds(0, 8)], value, mask=mask)


def large_masked(x_ref, o_ref, mine):
    mask = jnp.arange(64) % 3 == 0
    pltpu.store(mine, pltpu.load(x_ref, mask=mask), mask=mask)


def transposed(x_ref, o_ref, square):
    o_ref[...] = square.T[...].reshape(64)


def expanded(x_ref, o_ref, mine):
    mask = mine[pl.ds(0, LANES)] > 2
    value = plsc.load_expanded(mine.at[pl.ds(8, LANES)], mask=mask)
    plsc.store_compressed(mine.at[pl.ds(16, LANES)], value, mask=mask)


def compressed_sum(x_ref, o_ref, mine, shared):
    mask = mine[pl.ds(0, LANES)] > 2
    plsc.addupdate_compressed(mine.at[pl.ds(8, LANES)], mine[pl.ds(0, LANES)], mask=mask)


def whole_sum(x_ref, o_ref, mine):
    plsc.addupdate(mine.at[pl.ds(8, LANES)], mine[pl.ds(0, LANES)])


def gathered(x_ref, o_ref, mine):
    rows = lax.iota(jnp.int32, LANES)
    value = plsc.load_gather(mine, [rows], mask=rows > 2)
    plsc.store_scatter(mine, [rows + 8], value, mask=rows > 2)
    plsc.addupdate_scatter(mine, [rows + 8], value)


def copied(x_ref, o_ref, mine):
    pltpu.sync_copy(x_ref, mine)


def copied_by_indices(x_ref, o_ref, mine, rows):
    pltpu.sync_copy(x_ref.at[rows], mine.at[pl.ds(0, 8)])


def added_by_indices(x_ref, o_ref, mine, rows, shared):
    pltpu.sync_copy(mine.at[pl.ds(0, 8)], shared.at[rows], add=True)


def ticket(x_ref, o_ref, counter):
    plsc.fetch_and_add(counter.at[1], 1, subcore_id=0)


def new_refs(x_ref, o_ref):
    ref = jax.new_ref(x_ref[...])
    ref[0] = 1
    o_ref[...] = jax.freeze(ref)


def scoped(x_ref, o_ref):
    def inside(one, semaphore):
        one[0] = 1
        pl.semaphore_signal(semaphore)
        pl.semaphore_wait(semaphore)

    pl.run_scoped(inside, VMEM, pltpu.SemaphoreType.REGULAR)


def printed(x_ref, o_ref):
    pl.debug_print("{}", x_ref)


def in_loops(x_ref, o_ref):
    @pl.loop(0, 8)
    def _(i):
        @pl.when(i > 3)
        def _():
            o_ref[i] = x_ref[i]


def in_a_parallel_loop(x_ref, o_ref, mine):
    @plsc.parallel_loop(0, 64, LANES)
    def _(i):
        mine[pl.ds(i, LANES)] = mine[pl.ds(i, LANES)] + 1


def pipelined(x_ref, o_ref):
    def body(inside, outside):
        outside[...] = inside[...] + 1

    block = pl.BlockSpec((16,), lambda i: (i,))
    pltpu.emit_pipeline(body, grid=(4,), in_specs=[block], out_specs=[block])(x_ref, o_ref)


ROWS = pltpu.VMEM((8,), jnp.int32)
# For each body the kernel's making, its scratch, and accesses that must be among those probed.
CASES = [
    (get_and_set, plain_kernel, [], {("read", "x_ref"), ("write", "o_ref")}),
    (set_a_part, plain_kernel, [], {("read", "x_ref"), ("write", "o_ref")}),
    (exchange, plain_kernel, [VMEM], {("write", "mine"), ("read", "mine"), ("write", "o_ref")}),
    (add_in_place, plain_kernel, [], {("update", "o_ref")}),
    (index_arrays, plain_kernel, [], {("read", "x_ref"), ("write", "o_ref")}),
    (index_arrays_in_refs, plain_kernel, [ROWS], {("read", "rows"), ("write", "o_ref")}),
    (masked, plain_kernel, [VMEM], {("read", "x_ref"), ("write", "mine")}),
    (large_masked, plain_kernel, [VMEM], {("read", "x_ref"), ("write", "mine")}),
    (transposed, plain_kernel, [pltpu.VMEM((8, 8), jnp.int32)], {("read", "square")}),
    (expanded, vector_kernel, [VMEM], {("read", "mine"), ("write", "mine")}),
    (compressed_sum, vector_kernel, [VMEM, SHARED], {("update", "mine")}),
    (whole_sum, vector_kernel, [VMEM], {("update", "mine")}),
    (gathered, vector_kernel, [VMEM], {("read", "mine"), ("write", "mine"), ("update", "mine")}),
    (copied, vector_kernel, [VMEM], {("read", "x_ref"), ("write", "mine")}),
    (
        copied_by_indices,
        vector_kernel,
        [VMEM, ROWS],
        {("read", "x_ref"), ("read", "rows"), ("write", "mine")},
    ),
    (
        added_by_indices,
        vector_kernel,
        [VMEM, ROWS, SHARED],
        {("read", "mine"), ("read", "rows"), ("atomic", "shared")},
    ),
    (ticket, vector_kernel, [SMEM], {("fetch_and_add", "counter")}),
    (new_refs, plain_kernel, [], {("write", "new_ref"), ("read", "new_ref"), ("write", "o_ref")}),
    (scoped, plain_kernel, [], {("write", "one")}),
    (printed, plain_kernel, [], {("read", "x_ref")}),
    (in_loops, plain_kernel, [], {("read", "x_ref"), ("write", "o_ref")}),
    (in_a_parallel_loop, vector_kernel, [VMEM], {("read", "mine"), ("write", "mine")}),
    (pipelined, chip_kernel, [], {("read", "x_ref"), ("write", "o_ref")}),
]


@pytest.mark.parametrize(
    ("body", "make", "scratch", "expected"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_every_access_is_probed_and_native_code_has_no_probe(body, make, scratch, expected):
    kernel = make(body, *scratch)
    compiled = compile_kernel(kernel, X, checked=Checked())
    assert compiled.unchecked == []
    assert expected <= {(kind, name) for kind, name, _ in accesses(compiled)}
    native = compile_kernel(kernel, X, checked=None)
    assert "cokernel_checked" not in native.ir
    assert "checked" not in native.spec
    assert "refs" not in native.memory


def test_a_primitive_that_reaches_a_ref_without_a_probe_is_reported_as_not_checked(monkeypatch):
    from cokernel.compiler.ops.registry import RULES

    def silent(context, eqn, ref, *indices):
        from cokernel.compiler.access import read
        from cokernel.compiler.probes import Access
        from cokernel.compiler.transforms import resolve

        transforms = jax.tree.unflatten(eqn.params["tree"], indices)
        return read(context, resolve(context, ref, transforms, "read", access=Access.NONE))

    load = compile_kernel(plain_kernel(get_and_set), X, checked=Checked())
    assert load.unchecked == []
    monkeypatch.setitem(RULES, _jax.get_p, silent)
    [sentence] = compile_kernel(plain_kernel(get_and_set), X, checked=Checked()).unchecked
    assert "get" in sentence
    assert "test_probes.py" in sentence
    assert "not seen" in sentence


def test_only_memory_checks_are_left_out_where_neither_races_nor_undefined_values_are_wanted():
    def body(x_ref, o_ref, ready):
        o_ref[...] = x_ref[...]
        pl.semaphore_signal(ready)
        pl.semaphore_wait(ready)

    kernel = plain_kernel(body, pltpu.SemaphoreType.REGULAR)
    options = Checked(races=False, uninitialised=False)
    called = calls(compile_kernel(kernel, X, checked=options))
    assert called["cokernel_checked_signal"] == called["cokernel_checked_wait"] == 1
    assert "cokernel_checked_access" not in called


def test_synchronisation_goes_through_the_checked_runtime():
    def body(x_ref, o_ref, mine, ready, done, counter):
        copy = pltpu.make_async_copy(x_ref, mine, done)
        copy.start()
        copy.wait()
        pl.semaphore_signal(ready, 1)
        pl.semaphore_wait(ready, 1)
        plsc.fetch_and_add(counter.at[0], pl.semaphore_read(ready), subcore_id=0)
        plsc.subcore_barrier()

    scratch = [VMEM, pltpu.SemaphoreType.REGULAR, pltpu.SemaphoreType.DMA, SMEM]
    called = calls(compile_kernel(vector_kernel(body, *scratch), X, checked=Checked()))
    assert called["cokernel_checked_step"] == 3  # In front of the copy, the signal and the ticket.
    assert called["cokernel_checked_dma"] == called["cokernel_checked_signal"] == 1
    assert called["cokernel_checked_wait"] == 2
    assert called["cokernel_checked_yield"] == called["cokernel_checked_read"] == 1
    assert called["cokernel_checked_barrier"] == 1
    native = {name for name in called if name.startswith("cokernel_") and "checked" not in name}
    assert native <= {"cokernel_frame", "cokernel_finish", "cokernel_fail_index", "cokernel_fail"}


def test_a_program_is_a_coroutine_if_the_schedule_may_interrupt_it():
    def body(x_ref, o_ref, ready):
        pl.semaphore_signal(ready)

    kernel = plain_kernel(body, pltpu.SemaphoreType.REGULAR)
    modes = {None: False, Checked(): True}
    for checked, expected in modes.items():
        [program] = compile_kernel(kernel, X, checked=checked).spec["programs"]
        assert program["is_coroutine"] is expected


def test_scopes_are_announced_and_ended():
    called = calls(compile_kernel(plain_kernel(scoped), X, checked=Checked()))
    assert called["cokernel_checked_allocate"] == called["cokernel_checked_release"] == 2
    called = calls(compile_kernel(plain_kernel(new_refs), X, checked=Checked()))
    assert called["cokernel_checked_allocate"] == called["cokernel_checked_release"] == 1


def test_what_python_does_is_reported_as_not_checked():
    def body(x_ref, o_ref):
        o_ref[...] = io_callback(lambda x: x, X, x_ref[...])

    [sentence] = compile_kernel(plain_kernel(body), X, checked=Checked()).unchecked
    assert "io_callback" in sentence
    assert "test_probes.py" in sentence


def test_a_debug_check_that_is_switched_off_is_reported_as_not_checked():
    def body(x_ref, o_ref):
        pl.debug_check(x_ref[0] > 0, "not positive")
        o_ref[...] = x_ref[...]

    [sentence] = compile_kernel(plain_kernel(body), X, checked=Checked()).unchecked
    assert "debug_check: JAX has it switched off" in sentence
    assert f"test_probes.py:{body.__code__.co_firstlineno + 1}" in sentence
    with pl.enable_debug_checks(True):
        unchecked = compile_kernel(plain_kernel(body), X, checked=Checked()).unchecked
    assert all("switched off" not in sentence for sentence in unchecked)


def test_the_sites_of_probes_name_the_line_and_the_ref():
    compiled = compile_kernel(plain_kernel(get_and_set), X, checked=Checked())
    [site] = [site for site in compiled.sites if site["name"] == "o_ref"]
    assert site["file"] == __file__
    assert site["line"] == get_and_set.__code__.co_firstlineno + 1
    assert site["shape"] == "(64,)"


def test_the_description_of_memory_has_every_ref():
    def body(x_ref, o_ref, mine, shared, high):
        def inside(own):
            own[0] = 1

        pl.run_scoped(inside, VMEM)

    kernel = vector_kernel(body, VMEM, SHARED, pltpu.HBM((3, 5), jnp.bfloat16))
    refs = compile_kernel(kernel, X, checked=Checked()).memory["refs"]
    by_name = {ref["name"]: ref for ref in refs}
    assert {name: ref["owner"] for name, ref in by_name.items()} == {
        "x_ref": "buffer",
        "o_ref": "buffer",
        "mine": "private",
        "shared": "shared",
        "high": "device",
        "own": "private",
    }
    assert [by_name[name]["buffer"] for name in ("x_ref", "o_ref")] == [0, 1]
    assert by_name["high"]["shape"] == [3, 5]
    assert by_name["high"]["itemsize"] == 2
    assert by_name["high"]["bytes"] == 30
    assert by_name["high"]["dtype"] == "bfloat16"
    assert by_name["own"]["kind"] == "scoped"
    assert by_name["own"]["file"] == __file__
    assert by_name["mine"]["kind"] == "scratch"
    assert by_name["mine"]["line"] is None


def test_outputs_that_overwrite_operands_are_looked_at_as_well():
    def body(x_ref, o_ref, p_ref):
        p_ref[...] = o_ref[...] = x_ref[...]

    kernel = cokernel.kernel(
        body,
        [X, X],
        mesh=cokernel.CoreMesh(core=1),
        input_output_aliases={0: 1},
    )
    compiled = compile_kernel(kernel, X, checked=Checked())
    assert compiled.spec["checked"]["outputs"] == [[1, 4], [2, 4]]


def wait_for_a_flag(x_ref, o_ref):
    lax.while_loop(lambda _: x_ref[0] == 0, lambda i: i + 1, 0)


def wait_for_a_carried_flag(x_ref, o_ref):
    lax.while_loop(lambda flag: flag == 0, lambda _: x_ref[0], x_ref[0])


def wait_in_a_function(x_ref, o_ref):
    @jax.jit
    def flag():
        return x_ref[pl.ds(0, 8)].sum()

    lax.while_loop(lambda _: flag() == 0, lambda i: i + 1, 0)


def loop_over_data(x_ref, o_ref):
    def body(i):
        o_ref[i] = x_ref[i]
        return i + 1

    lax.while_loop(lambda i: i < x_ref.shape[0], body, 0)


@pytest.mark.parametrize(
    ("body", "kinds", "yields"),
    [
        (wait_for_a_flag, {"poll"}, 1),
        (wait_for_a_carried_flag, {"poll"}, 1),
        (wait_in_a_function, {"poll"}, 1),
        (loop_over_data, {"read"}, 0),
    ],
)
def test_reads_that_decide_how_long_a_loop_lasts_are_polls(body, kinds, yields):
    compiled = compile_kernel(plain_kernel(body), X, checked=Checked())
    assert {kind for kind, name, _ in accesses(compiled) if name == "x_ref"} == kinds
    assert calls(compiled)["cokernel_checked_yield"] == yields


def test_reads_of_memory_that_is_a_cores_own_are_no_polls():
    def body(x_ref, o_ref, mine):
        mine[0] = 3
        lax.while_loop(lambda _: mine[0] == x_ref[0], lambda i: i + 1, 0)

    found = accesses(compile_kernel(plain_kernel(body, VMEM), X, checked=Checked()))
    assert ("read", "mine", "read") in found
    assert ("poll", "x_ref", "read") in found
