"""Under `jax.checkpoint` a kernel is saved or runs again as the policy says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cokernel
from cokernel import primitive
from cokernel.primitive import all_equations

CORES = cokernel.CoreMesh(core=1)
F32 = jnp.float32
VECTOR4 = jax.ShapeDtypeStruct((4,), F32)
POLICIES = jax.checkpoint_policies


def scale_body(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] * y_ref[...]


scale = cokernel.kernel(scale_body, VECTOR4, mesh=CORES)


@jax.custom_vjp
def multiply(x, y):
    return scale(x, y)


multiply.defvjp(
    lambda x, y: (scale(x, y), (x, y)), lambda saved, g: (scale(g, saved[1]), scale(g, saved[0]))
)


def loss(x, y):
    return jnp.sum(jnp.sin(multiply(jnp.cos(x), y)))


def num_kernels(fn, *args):
    jaxpr = jax.make_jaxpr(fn)(*args)
    return sum(eqn.primitive is primitive.mpmd_map_p for eqn in all_equations(jaxpr.jaxpr))


def kernel_named(primitive_, *avals, **params):
    return params.get("name") == "scale_body"


@pytest.mark.parametrize(
    ("policy", "forward_runs"),
    [
        (POLICIES.everything_saveable, 1),
        (POLICIES.nothing_saveable, 2),
        (POLICIES.dots_saveable, 2),
        (kernel_named, 1),
        (None, 2),
    ],
)
def test_the_policy_decides_how_often_the_kernel_runs(policy, forward_runs):
    checkpointed = jax.checkpoint(loss, policy=policy)
    args = (jnp.ones(4), jnp.ones(4))
    # Two more kernels are those of the backward rule.
    assert num_kernels(jax.grad(checkpointed, argnums=(0, 1)), *args) == forward_runs + 2


def test_a_kernel_with_refs_runs_in_both_passes():
    def body(r_ref):
        r_ref[...] = r_ref[...] * 2.0

    double_in_place = cokernel.kernel(body, mesh=CORES)

    @jax.custom_vjp
    def double(x):
        ref = jax.new_ref(x)
        double_in_place(ref)
        return ref[...]

    double.defvjp(lambda x: (double(x), None), lambda _, g: (2.0 * g,))

    def fn(x):
        return jnp.sum(jnp.sin(double(x)))

    x = jnp.ones(4)
    assert num_kernels(jax.grad(fn), x) == 1
    saved = jax.checkpoint(fn, policy=POLICIES.everything_saveable)
    assert num_kernels(jax.grad(saved), x) == 1
    assert num_kernels(jax.grad(jax.checkpoint(fn)), x) == 2


def test_a_kernel_that_prints_runs_once():
    def body(x_ref, o_ref):
        jax.debug.print("hello")
        o_ref[...] = x_ref[...]

    kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)

    def fn(x):
        return jnp.sum(jnp.sin(kernel(jax.lax.stop_gradient(x)) * x))

    checkpointed = jax.checkpoint(fn, policy=POLICIES.nothing_saveable)
    assert num_kernels(jax.grad(checkpointed), jnp.ones(4)) == 1


def test_a_kernel_without_arguments_can_be_recomputed():
    def body(o_ref):
        o_ref[...] = jnp.full((4,), 2.0, F32)

    twos = cokernel.kernel(body, VECTOR4, mesh=CORES)

    def fn(x):
        return jnp.sum(jnp.sin(twos() * x))

    assert num_kernels(jax.grad(jax.checkpoint(fn)), jnp.ones(4)) == 2
    saved = jax.checkpoint(fn, policy=POLICIES.everything_saveable)
    assert num_kernels(jax.grad(saved), jnp.ones(4)) == 1


@pytest.mark.parametrize(
    "policy", [None, POLICIES.everything_saveable, POLICIES.nothing_saveable, kernel_named]
)
def test_gradients_equal_those_without_checkpoint(policy):
    x, y = jnp.arange(4.0), jnp.arange(1.0, 5.0)
    wanted = jax.grad(lambda x, y: jnp.sum(jnp.sin(jnp.cos(x) * y)), argnums=(0, 1))(x, y)
    for transform in (lambda f: f, jax.jit):
        got = transform(jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1)))(x, y)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", [POLICIES.everything_saveable, POLICIES.nothing_saveable])
def test_gradients_with_refs_equal_those_without_checkpoint(policy):
    def body(r_ref):
        r_ref[...] = r_ref[...] * 2.0

    double_in_place = cokernel.kernel(body, mesh=CORES)

    @jax.custom_vjp
    def double(x):
        ref = jax.new_ref(x)
        double_in_place(ref)
        return ref[...]

    double.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))

    def fn(x):
        return jnp.sum(jnp.sin(double(x)) ** 2)

    x = jnp.arange(4.0)
    wanted = jax.grad(lambda x: jnp.sum(jnp.sin(2.0 * x) ** 2))(x)
    got = jax.jit(jax.grad(jax.checkpoint(fn, policy=policy)))(x)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
