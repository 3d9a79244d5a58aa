"""Stock Pallas kernels, written against public Pallas names only, run on the CPU backend."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
import cokernel.pallas

X = np.arange(64, dtype=np.float32)


@pytest.fixture(autouse=True)
def _chip():
    with cokernel.target("v6e"):
        yield


def vector_mesh():
    return plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=2, num_subcores=4
    )


def double(x_ref, out_ref, buffer):
    part = pl.ds((lax.axis_index("core") * 4 + lax.axis_index("subcore")) * 8, 8)
    pltpu.sync_copy(x_ref.at[part], buffer)
    buffer[...] = buffer[...] * 2
    pltpu.sync_copy(buffer, out_ref.at[part])


def one_mesh(**options):
    return pl.kernel(
        double,
        out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
        mesh=vector_mesh(),
        scratch_types=[pltpu.VMEM((8,), jnp.float32)],
        **options,
    )


def two_meshes():
    vectors = vector_mesh()
    scalars = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2)

    def wait_and_double(x_ref, out_ref, buffer, ready):
        pl.semaphore_wait(ready, 1)
        double(x_ref, out_ref, buffer)

    def release(x_ref, out_ref, buffer, ready):
        for subcore in range(4):
            pl.semaphore_signal(ready, 1, device_id={"subcore": subcore})

    return pl.kernel(
        [wait_and_double, release],
        out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
        mesh=[vectors, scalars],
        scratch_types=[
            (pltpu.VMEM @ vectors)((8,), jnp.float32),
            pltpu.SemaphoreType.REGULAR @ vectors,
        ],
    )


@pytest.mark.parametrize("interpret", [False, True, pltpu.InterpretParams()])
def test_a_kernel_of_one_mesh(interpret):
    with cokernel.pallas.enabled():
        np.testing.assert_array_equal(one_mesh(interpret=interpret)(X), X * 2)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_kernel_of_two_meshes(transform):
    with cokernel.pallas.enabled():
        np.testing.assert_array_equal(transform(two_meshes())(X), X * 2)


def single(**options):
    """A kernel that JAX can run by itself as well, by interpretation."""

    def double_all(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return pl.kernel(
        double_all,
        out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
        mesh=pltpu.TensorCoreMesh(axis_name="core", num_cores=1),
        interpret=True,
        **options,
    )


def is_ours(fn):
    """Calls a function that doubles X, and says whether Cokernel launched it."""
    with cokernel.pallas.enabled():
        jax.block_until_ready(one_mesh(name="marker")(X))
    np.testing.assert_array_equal(jax.block_until_ready(fn(X)), X * 2)
    return cokernel.last_launch().kernel != "marker"


MPMD = cokernel._jax.stock_mpmd
STOCK = MPMD._mpmd_map, MPMD._dedup_consts_and_unify_jaxpr_signatures


def is_untouched():
    return (
        "bind" not in vars(cokernel._jax.stock_mpmd_map_p)
        and (MPMD._mpmd_map, MPMD._dedup_consts_and_unify_jaxpr_signatures) == STOCK
        and cokernel._jax.stock_mpmd_map_p not in cokernel._jax.platform_lowerings["cpu"]
    )


def callers(kernel):
    jitted = jax.jit(kernel)
    return {
        "eager": kernel,
        "jit": jitted,
        "jit in jit": jax.jit(lambda x: jitted(x)),
        "cond": jax.jit(lambda x: lax.cond(x[0] > -1, jitted, lambda x: x, x)),
        "vmap": jax.jit(lambda x: jax.vmap(jitted)(x[None])[0]),
        "scan": jax.jit(lambda x: lax.scan(lambda c, _: (jitted(c), None), x, None, 1)[0]),
    }


@pytest.mark.parametrize("how", sorted(callers(single)))
def test_no_cache_serves_what_was_traced_under_the_other_setting(how):
    function = callers(single())[how]
    assert not is_ours(function)
    with cokernel.pallas.enabled():
        assert is_ours(function)
    assert not is_ours(function)
    cokernel.pallas.enable()
    try:
        assert is_ours(function)
    finally:
        cokernel.pallas.disable()
    assert not is_ours(function)


def test_a_jaxpr_is_run_by_whoever_is_enabled_when_it_is_evaluated():
    jaxpr = jax.make_jaxpr(jax.jit(single()))(X)

    def evaluate(x):
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, x)[0]

    assert not is_ours(evaluate)
    with cokernel.pallas.enabled():
        assert is_ours(evaluate)
        assert is_ours(jax.jit(evaluate))
    assert not is_ours(evaluate)


def test_what_was_traced_before_is_lowered_by_whoever_is_enabled():
    traced = jax.jit(single()).trace(X)
    with cokernel.pallas.enabled():
        assert is_ours(traced.lower().compile())
    assert not is_ours(jax.jit(single()).trace(X).lower().compile())


def test_outside_jax_does_what_it_did():
    kernel = jax.jit(two_meshes())
    with cokernel.pallas.enabled():
        np.testing.assert_array_equal(kernel(X), X * 2)
    # The same function, already compiled with our backend, must not be taken from a cache.
    with pytest.raises(NotImplementedError, match="multiple mesh/function pairs"):
        kernel(X)
    assert is_untouched()


def test_enable_and_disable_are_switches_and_blocks_may_be_nested_in_them():
    kernel = jax.jit(two_meshes())
    cokernel.pallas.enable()
    cokernel.pallas.enable()
    try:
        np.testing.assert_array_equal(kernel(X), X * 2)
        with cokernel.pallas.enabled():
            with cokernel.pallas.enabled():
                pass
            cokernel.pallas.disable()
            np.testing.assert_array_equal(kernel(X), X * 2)
            assert not is_untouched()
    finally:
        cokernel.pallas.disable()
    assert is_untouched()
    with pytest.raises(NotImplementedError, match="multiple mesh/function pairs"):
        kernel(X)


def test_an_exception_in_the_block_ends_it():
    with pytest.raises(RuntimeError, match="mine"), cokernel.pallas.enabled():
        raise RuntimeError("mine")
    assert is_untouched()


def test_the_block_decorates_functions_too():
    @cokernel.pallas.enabled()
    def run():
        return is_ours(single())

    assert run()
    assert run()
    assert is_untouched()


def test_pallas_call_stays_with_jax():
    call = pl.pallas_call(
        lambda x_ref, out_ref: out_ref.__setitem__(..., x_ref[...] * 2),
        out_shape=jax.ShapeDtypeStruct((64,), jnp.float32),
        interpret=True,
    )
    with cokernel.pallas.enabled():
        assert not is_ours(call)


def test_the_block_holds_for_its_own_thread():
    inside, checked = threading.Event(), threading.Event()
    outcome = []

    def other():
        inside.wait()
        with cokernel.target("v6e"):
            try:
                two_meshes()(X)
            except NotImplementedError as error:
                outcome.append(str(error))
        checked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with cokernel.pallas.enabled():
        inside.set()
        checked.wait()
        np.testing.assert_array_equal(two_meshes()(X), X * 2)
    thread.join()
    assert len(outcome) == 1
    assert "multiple mesh/function pairs" in outcome[0]


def test_a_deadlock_of_a_stock_kernel_is_reported():
    mesh = vector_mesh()

    def wait(x_ref, out_ref, never):
        pl.semaphore_wait(never, 1)

    kernel = pl.kernel(
        wait,
        out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
        mesh=mesh,
        scratch_types=[pltpu.SemaphoreType.REGULAR],
    )
    with cokernel.pallas.enabled(), pytest.raises(Exception, match=r"(?s)Deadlock:.*'never'"):
        jax.block_until_ready(kernel(X))


def test_transformations_are_those_of_our_primitive():
    def value(x):
        return one_mesh()(x)

    with cokernel.pallas.enabled():
        np.testing.assert_array_equal(jax.vmap(value)(np.stack([X, X + 1])), [X * 2, X * 2 + 2])
        np.testing.assert_array_equal(jax.jvp(value, (X,), (X + 1,))[1], X * 2 + 2)
        with pytest.raises(NotImplementedError, match=r"no reverse mode.*jax.custom_vjp"):
            jax.grad(lambda x: value(x).sum())(X)


def test_every_form_of_outputs_and_scratch():
    out = jax.ShapeDtypeStruct((64,), jnp.float32)
    for out_type in (out, (out,), [out, pltpu.HBM((64,), jnp.float32)], {"doubled": out}):

        @pl.kernel(
            out_type=out_type,
            mesh=vector_mesh(),
            scratch_types={"buffer": pltpu.VMEM((8,), jnp.float32)},
            compiler_params=pltpu.CompilerParams(needs_layout_passes=False),
            cost_estimate=pl.CostEstimate(flops=64, transcendentals=0, bytes_accessed=512),
            name="doubling",
            metadata={"author": "somebody"},
        )
        def run(x_ref, *out_refs, buffer):
            for out_ref in jax.tree.leaves(out_refs):
                double(x_ref, out_ref, buffer)

        with cokernel.pallas.enabled():
            results = jax.block_until_ready(jax.jit(run)(X))
        assert cokernel.last_launch().kernel == "doubling"
        assert jax.tree.structure(results) == jax.tree.structure(
            out_type, is_leaf=lambda leaf: hasattr(leaf, "dtype")
        )
        for result in jax.tree.leaves(results):
            np.testing.assert_array_equal(result, X * 2)


def test_refs_are_written_in_place():
    kernel = pl.kernel(double, mesh=vector_mesh(), scratch_types=[pltpu.VMEM((8,), jnp.float32)])
    result = jax.new_ref(jnp.zeros(64))
    with cokernel.pallas.enabled():
        kernel(jnp.asarray(X), result)
    np.testing.assert_array_equal(result[...], X * 2)


@pytest.mark.filterwarnings("ignore:.*core_map is deprecated")
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_core_map_in_run_state(transform):
    def run(x):
        def body(refs):
            @pl.core_map(vector_mesh(), scratch_shapes=[pltpu.VMEM((8,), jnp.float32)])
            def _(buffer):
                double(*refs, buffer)

        return pl.run_state(body)((x, jnp.zeros_like(x)))[1]

    with cokernel.pallas.enabled():
        assert is_ours(transform(run))


@pytest.mark.parametrize("is_made_inside", [True, False])
def test_messages_name_refs_that_a_program_closes_over(is_made_inside):
    indices = jnp.full(8, 60, jnp.int32)

    def read_outside(given_ref, rows, buffer):
        pltpu.sync_copy(given_ref, rows)
        pltpu.sync_copy(closed_ref.at[pl.ds(rows[...][0], 8)], buffer)
        pltpu.sync_copy(buffer, closed_ref.at[pl.ds(0, 8)])

    def make():
        return pl.kernel(
            read_outside,
            mesh=vector_mesh(),
            scratch_types=[pltpu.VMEM((8,), jnp.int32), pltpu.VMEM((8,), jnp.float32)],
        )

    closed_ref = jax.new_ref(jnp.asarray(X))
    kernel = make()
    with cokernel.pallas.enabled():
        if is_made_inside:
            kernel = make()
        name = "closed_ref" if is_made_inside else "argument1"
        with pytest.raises(Exception, match=f"OutOfBounds: dma_start of '{name}' .*60 to 67"):
            jax.block_until_ready(kernel(indices) or closed_ref[...])


def test_the_forced_interpreter_gives_way():
    with cokernel.pallas.enabled(), pltpu.force_tpu_interpret_mode():
        assert is_ours(one_mesh())
