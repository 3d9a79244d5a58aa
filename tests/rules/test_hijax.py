"""Kernels take values of types that stand for several arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import hijax

import cokernel
from cokernel import _jax, primitive

CORES = cokernel.CoreMesh(core=1)
F32 = jnp.float32
VECTOR4 = jax.ShapeDtypeStruct((4,), F32)


@dataclasses.dataclass(frozen=True)
class PairType(hijax.HiType):
    """The type of two vectors of float32, the second half as long as the first."""

    size: int

    def lo_ty(self):
        return [
            _jax.ShapedArray((self.size,), jnp.dtype(F32)),
            _jax.ShapedArray((self.size // 2,), jnp.dtype(F32)),
        ]

    def lower_val(self, pair):
        return [pair.first, pair.second]

    def raise_val(self, first, second):
        return Pair(first, second)

    def to_tangent_aval(self):
        return PairType(self.size)


@dataclasses.dataclass(frozen=True)
class Pair:
    first: object
    second: object


hijax.register_hitype(Pair, lambda pair: PairType(pair.first.size))


def pair():
    return Pair(jnp.arange(4.0), jnp.array([10.0, 20.0]))


def zero_pair():
    return Pair(jnp.zeros(4), jnp.zeros(2))


def copy_body(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def lowered(fn, *args):
    jaxpr = jax.jit(fn).trace(*args).jaxpr
    low = _jax.partial_eval.lower_jaxpr2(jaxpr)
    [eqn] = [eqn for eqn in low.eqns if eqn.primitive is primitive.mpmd_map_p]
    return eqn


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_arguments_and_outputs(transform):
    kernel = cokernel.kernel(copy_body, PairType(4), mesh=CORES)
    result = transform(kernel)(pair())
    assert isinstance(result, Pair)
    np.testing.assert_array_equal(result.first, np.arange(4.0))
    np.testing.assert_array_equal(result.second, [10, 20])


def test_names_tell_the_parts_apart():
    kernel = cokernel.kernel(copy_body, PairType(4), mesh=CORES)
    [jaxpr] = lowered(kernel, pair()).params["jaxprs"]
    assert jaxpr.debug_info.arg_names == ("x_ref.0", "x_ref.1", "o_ref.0", "o_ref.1")
    assert not jaxpr.is_high


def test_aliases_follow_the_parts():
    def body(y_ref, x_ref, p_ref, o_ref):
        o_ref[...] = x_ref[...]
        p_ref[...] = y_ref[...]

    kernel = cokernel.kernel(body, [VECTOR4, PairType(4)], mesh=CORES, input_output_aliases={1: 1})
    eqn = lowered(kernel, jnp.ones(4), pair())
    assert eqn.params["input_output_aliases"] == ((1, 1), (2, 2))
    out, result = kernel(jnp.ones(4), pair())
    np.testing.assert_array_equal(out, np.ones(4))
    np.testing.assert_array_equal(result.second, [10, 20])


def test_aliases_between_different_types_are_refused():
    kernel = cokernel.kernel(copy_body, PairType(6), mesh=CORES, input_output_aliases={0: 0})
    with pytest.raises(ValueError, match="can only overwrite an input of its own type"):
        kernel(pair())


def test_scratch():
    def body(x_ref, o_ref, scratch_ref):
        scratch_ref[...] = x_ref[...]
        o_ref[...] = scratch_ref[...]

    kernel = cokernel.kernel(
        body,
        PairType(4),
        mesh=CORES,
        scratch_types=[_jax.MemoryRef(PairType(4), _jax.TpuMemorySpace.VMEM)],
    )
    np.testing.assert_array_equal(kernel(pair()).first, np.arange(4.0))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_refs_that_are_passed(transform):
    def body(x_ref, r_ref):
        r_ref[...] = x_ref[...]

    kernel = cokernel.kernel(body, mesh=CORES)

    @transform
    def fn(x, initial):
        ref = jax.new_ref(initial)
        kernel(x, ref)
        return ref[...]

    np.testing.assert_array_equal(fn(pair(), zero_pair()).second, [10, 20])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_refs_that_are_closed_over(transform):
    @transform
    def fn(x, initial):
        ref = jax.new_ref(initial)

        def body(x_ref):
            ref[...] = x_ref[...]

        cokernel.kernel(body, mesh=CORES)(x)
        return ref[...]

    np.testing.assert_array_equal(fn(pair(), zero_pair()).second, [10, 20])


def test_derivatives_are_refused_by_name():
    kernel = cokernel.kernel(copy_body, PairType(4), mesh=CORES)
    with pytest.raises(NotImplementedError, match="cannot be differentiated by 'x_ref'"):
        jax.jvp(kernel, (pair(),), (pair(),))
