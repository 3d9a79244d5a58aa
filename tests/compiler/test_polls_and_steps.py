"""Others get their turn in front of the stores to memory that is polled, wherever these are."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.compiler.checked_harness import calls, compile_kernel

CHECKED = cokernel.Checked()
FLAG = cokernel.shared((1,), jnp.int32)
OUT = jax.ShapeDtypeStruct((1,), jnp.int32)


def until_raised(flag):
    lax.while_loop(lambda seen: seen < 1, lambda _: flag[0], jnp.int32(0))


def by_its_condition(flag):
    lax.while_loop(lambda _: flag[0] < 1, lambda n: n + 1, jnp.int32(0))


def inside_of_a_branch(flag):
    pl.when(lax.axis_index("core") == 0)(lambda: until_raised(flag))


def inside_of_a_loop(flag):
    lax.fori_loop(0, 2, lambda i, _: until_raised(flag), None)


def by_a_call(flag):
    lax.while_loop(lambda seen: seen < 1, lambda _: jax.jit(lambda: flag[0])(), jnp.int32(0))


def inside_of_a_scope(flag):
    pl.run_scoped(lambda _: until_raised(flag), pltpu.VMEM((1,), jnp.int32))


WATCHERS = [
    until_raised,
    by_its_condition,
    inside_of_a_branch,
    inside_of_a_loop,
    by_a_call,
    inside_of_a_scope,
]


def raised(flag):
    flag[0] = 1


def in_a_branch(flag):
    pl.when(flag[0] == 0)(lambda: raised(flag))


def in_a_counted_loop(flag):
    lax.fori_loop(0, 2, lambda i, _: raised(flag), None)


def in_a_loop(flag):
    def step(n):
        raised(flag)
        return n + 1

    lax.while_loop(lambda n: n < 2, step, 0)


def in_a_loop_of_any_order(flag):
    plsc.parallel_loop(0, 2)(lambda _: raised(flag))


def in_a_call(flag):
    jax.jit(lambda: raised(flag))()


def in_a_rematerialised_call(flag):
    jax.checkpoint(lambda x: (raised(flag), x)[1])(1.0)


def in_a_scope(flag):
    pl.run_scoped(lambda _: raised(flag), pltpu.VMEM((1,), jnp.int32))


def by_adding(flag):
    plsc.addupdate(flag.at[...], jnp.ones(1, jnp.int32))


def through_a_part(flag):
    flag.at[pl.ds(0, 1)][...] = jnp.ones(1, jnp.int32)


WRITERS = [
    raised,
    in_a_branch,
    in_a_counted_loop,
    in_a_loop,
    in_a_loop_of_any_order,
    in_a_call,
    in_a_rematerialised_call,
    in_a_scope,
    by_adding,
    through_a_part,
]


def stores_that_let_others_go_first(body, *scratch, cores=2, checked=CHECKED, out=OUT):
    kernel = cokernel.kernel(body, out, mesh=cokernel.CoreMesh(core=cores), scratch_types=scratch)
    return calls(compile_kernel(kernel, checked=checked))["cokernel_checked_step"]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("uninitialised", [True, False])
def test_others_go_before_a_store_to_a_flag_that_is_polled(write, uninitialised):
    def body(out_ref, flag):
        write(flag)
        until_raised(flag)
        out_ref[0] = flag[0]

    options = cokernel.Checked(uninitialised=uninitialised)
    assert stores_that_let_others_go_first(body, FLAG, checked=options) == 1


@pytest.mark.parametrize("poll", WATCHERS, ids=lambda poll: poll.__name__)
def test_a_poll_is_found_wherever_it_is(poll):
    def body(out_ref, flag):
        flag[0] = 1
        poll(flag)
        out_ref[0] = 1

    assert stores_that_let_others_go_first(body, FLAG) == 1


def test_other_memory_of_the_same_kind_is_stored_to_at_once():
    def body(out_ref, flag, other):
        until_raised(flag)
        other[0] = 1
        out_ref[0] = other[0]

    assert stores_that_let_others_go_first(body, FLAG, FLAG) == 0


def test_memory_of_the_core_itself_is_stored_to_at_once():
    def body(out_ref, flag, own):
        own[0] = 0
        lax.while_loop(lambda seen: seen < 1, lambda _: flag[0] + own[0], jnp.int32(0))
        own[0] = 1
        out_ref[0] = own[0]

    assert stores_that_let_others_go_first(body, FLAG, pltpu.SMEM((1,), jnp.int32)) == 0


def test_a_flag_that_another_program_polls_is_known():
    def raise_it(out_ref, flag):
        flag[0] = 1

    def watch(out_ref, flag):
        until_raised(flag)
        out_ref[0] = flag[0]

    def kernel():
        return cokernel.mpmd_map(
            [
                (cokernel.CoreMesh(core=1), raise_it),
                (cokernel.CoreMesh(lane=1), watch),
            ],
            out_types=OUT,
            scratch_types=[pltpu.HBM((1,), jnp.int32)],
        )()

    assert calls(compile_kernel(kernel, checked=CHECKED))["cokernel_checked_step"] == 1


def test_a_flag_that_the_cores_of_a_scope_share_is_known():
    def body(out_ref):
        @functools.partial(pl.run_scoped, flag=pltpu.HBM((1,), jnp.int32), collective_axes="core")
        def _scope(flag):
            flag[0] = 1
            until_raised(flag)
            out_ref[0] = 1

    assert stores_that_let_others_go_first(body) == 1


def test_one_core_alone_lets_nobody_go_first():
    def body(out_ref, flag):
        flag[0] = 1
        until_raised(flag)
        out_ref[0] = 1

    assert stores_that_let_others_go_first(body, FLAG, cores=1) == 0


def test_native_code_has_no_steps():
    def body(out_ref, flag):
        flag[0] = 1
        until_raised(flag)
        out_ref[0] = 1

    assert stores_that_let_others_go_first(body, FLAG, checked=None) == 0


def yields_of(watch):
    """How many loops of a kernel, whose cores add to each other's memory, let others run."""

    def body(out_ref, own):
        own[0] = 0
        plsc.subcore_barrier()
        plsc.fetch_and_add(own.at[1], 1, subcore_id=0)
        watch(own)
        plsc.subcore_barrier()

    with cokernel.target("v6e"):
        kernel = cokernel.kernel(
            body,
            OUT,
            mesh=plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=2
            ),
            scratch_types=[pltpu.SMEM((8,), jnp.int32)],
        )
        return calls(compile_kernel(kernel, checked=CHECKED))["cokernel_checked_yield"]


def test_who_looks_at_the_same_place_of_its_own_memory_polls():
    def at_a_place_of_each(own):
        def is_down(_):
            return own[(lax.axis_index("subcore") + 1) % 8] < 1

        lax.while_loop(is_down, lambda n: n + 1, 0)

    assert yields_of(until_raised) == 1
    assert yields_of(by_its_condition) == 1
    assert yields_of(by_a_call) == 1
    assert yields_of(at_a_place_of_each) == 1


def test_who_searches_its_own_memory_does_not_poll():
    assert yields_of(lambda own: lax.while_loop(lambda n: own[n] < 1, lambda n: n + 1, 0)) == 0


def test_who_changes_what_it_looks_at_does_not_poll():
    def count(own):
        def step(n):
            own[0] = n + 1
            return n + 1

        lax.while_loop(lambda n: own[0] < 5, step, 0)

    assert yields_of(count) == 0
