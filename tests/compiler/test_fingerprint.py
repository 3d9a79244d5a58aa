"""Fingerprints differ where the code does, and agree where a process does the same again."""

import collections

import jax
import jax.numpy as jnp
import llvmlite
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import _jax, primitive
from cokernel.compiler import fingerprint
from cokernel.compiler.fingerprint import Unknown
from cokernel.compiler.ops import load_rules
from cokernel.compiler.ops.registry import RULES


def of_body(function, *shapes, size=1):
    """The fingerprint of a program on vectors of float32, whose output has the same shape."""

    def body(x_ref, out_ref):
        out_ref[...] = function(x_ref[...])

    kernel = cokernel.mpmd_map(
        [(cokernel.CoreMesh(core=size), body)], jax.ShapeDtypeStruct((16,), jnp.float32)
    )
    jaxpr = jax.make_jaxpr(kernel)(jnp.zeros(16, jnp.float32))
    [eqn] = [eqn for eqn in primitive.all_equations(jaxpr) if eqn.primitive is primitive.mpmd_map_p]
    return fingerprint.fingerprint(eqn.params["jaxprs"], eqn.params["meshes"])


def scaled(constant):
    return lambda x: x * constant


def test_the_same_kernel_traced_again_has_the_same_fingerprint():
    def make():
        scale = jnp.float32(3)
        return lambda x: jnp.where(lax.sort(x) > 0, x * scale, lax.fori_loop(0, 3, step, x))

    def step(_, x):
        return jnp.sin(x)

    assert of_body(make()) == of_body(make())


DIFFERENT = {
    "another literal": (scaled(2.0), scaled(3.0)),
    "a zero of the other sign": (scaled(0.0), scaled(-0.0)),
    "another primitive": (lambda x: x + x, lambda x: x * x),
    "another operand": (lambda x: (x + 1) - x, lambda x: x - (x + 1)),
    "another parameter": (lambda x: lax.cumsum(x), lambda x: lax.cumsum(x, reverse=True)),
    "another length": (
        lambda x: lax.fori_loop(0, 3, lambda _, y: y * y, x),
        lambda x: lax.fori_loop(0, 4, lambda _, y: y * y, x),
    ),
    "another line": (
        lambda x: x + 1,
        lambda x: x + 1,
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_changes_the_code_or_its_reports_changes_the_fingerprint(case):
    one, other = DIFFERENT[case]
    assert of_body(one) != of_body(other)


def test_arrays_differ_by_their_elements_dtype_and_shape():
    arrays = [
        np.array([1, 2], np.int32),
        np.array([1, 3], np.int32),
        np.array([1, 2], np.uint32),
        np.array([[1, 2]], np.int32),
        jnp.array([1, 2], jnp.bfloat16),
    ]
    assert len({fingerprint.fingerprint(array) for array in arrays}) == len(arrays)
    constants = [jax.make_jaxpr(lambda x, a=a: x + a)(arrays[0]).jaxpr for a in arrays[:2]]
    assert len({fingerprint.fingerprint(jaxpr) for jaxpr in constants}) == 2


def test_the_mesh_and_the_settings_of_jax_are_part_of_it():
    assert of_body(jnp.sin) != of_body(jnp.sin, size=2)
    before = of_body(jnp.sin)
    with jax.default_matmul_precision("float32"):
        assert of_body(jnp.sin) != before
    assert of_body(jnp.sin) == before


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (fingerprint, "_source_digest", lambda: "another"),
        (llvmlite, "__version__", "0.0.0"),
        (jax, "__version__", "0.0.0"),
    ],
)
def test_what_takes_part_in_compiling_is_part_of_it(monkeypatch, module, name, value):
    before = fingerprint.fingerprint(1)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, value)
        fingerprint._versions.cache_clear()
        assert fingerprint.fingerprint(1) != before
    fingerprint._versions.cache_clear()
    assert fingerprint.fingerprint(1) == before


def test_a_primitive_that_only_has_the_name_of_another_is_unknown():
    own = _jax.Primitive("sin")
    own.def_abstract_eval(lambda x: x)
    with pytest.raises(Unknown, match="sin"):
        of_body(lambda x: own.bind(x))


def test_functions_are_unknown():
    with pytest.raises(Unknown, match="function"):
        fingerprint.fingerprint({"callback": lambda: None})


def test_all_primitives_with_a_rule_are_known():
    load_rules()
    places = collections.Counter(
        fingerprint._place_of(known)
        for known in RULES
        if known.name not in ("mpmd_map", "custom_lin")
    )
    assert set(places.values()) == {1}


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([np.int32(1), np.int64(1), np.float32(1), np.dtype("int8")]),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def _spelling(value):
    """A value as Python writes it, lists and tuples alike, as fingerprints treat them."""
    if isinstance(value, list | tuple):
        return ("sequence", *map(_spelling, value))
    if isinstance(value, dict):
        return ("map", *((key, _spelling(item)) for key, item in value.items()))
    return repr(value)


@given(plain, plain)
def test_plain_data_has_the_same_fingerprint_exactly_if_it_is_written_the_same(one, other):
    same = _spelling(one) == _spelling(other)
    assert (fingerprint.fingerprint(one) == fingerprint.fingerprint(other)) is same


def test_kernels_with_refs_dmas_and_semaphores_are_known():
    def body(x_ref, out_ref):
        def scoped(buffer, semaphore):
            pltpu.async_copy(x_ref.at[pl.ds(0, 8)], buffer, semaphore).wait()
            pl.when(buffer[0] > 0)(lambda: pltpu.sync_copy(buffer, out_ref.at[pl.ds(8, 8)]))

        pl.run_scoped(scoped, pltpu.VMEM((8,), jnp.float32), pltpu.SemaphoreType.DMA)

    kernel = cokernel.mpmd_map(
        [(cokernel.CoreMesh(core=1), body)], jax.ShapeDtypeStruct((16,), jnp.float32)
    )
    jaxpr = jax.make_jaxpr(kernel)(jnp.zeros(16, jnp.float32))
    assert len(fingerprint.fingerprint(jaxpr.jaxpr.eqns[0].params["jaxprs"])) == 64
