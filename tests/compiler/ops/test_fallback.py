"""A primitive without a rule runs through XLA, with one warning, or is refused by name."""

import os
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import cokernel
from cokernel import _jax
from cokernel.compiler.ops import fallback
from cokernel.compiler.ops.fallback import ThroughXlaWarning

MESH = cokernel.CoreMesh(core=1)


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(fallback, "_warned", set())


def primitive(name, compute, *, effects=(), multiple_results=False):
    """A new primitive that only XLA knows how to compute; nobody does if `compute` is None."""
    new = Primitive(name)
    new.multiple_results = multiple_results

    def abstract(*avals, **params):
        given = jax.eval_shape(
            compute or (lambda x, *_: x),
            *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals),
        )
        out = jax.tree.map(lambda leaf: _jax.ShapedArray(leaf.shape, leaf.dtype), given)
        return (out if not multiple_results else list(out)), set(effects)

    new.def_effectful_abstract_eval(abstract)
    if compute is not None:
        mlir.register_lowering(new, mlir.lower_fun(compute, multiple_results=multiple_results))
    return new


def run(function, *arrays, out, mesh=MESH):
    def body(*refs):
        *inputs, output = refs
        output[...] = function(*(ref[...] for ref in inputs))

    kernel = cokernel.kernel(body, jax.ShapeDtypeStruct(out.shape, out.dtype), mesh=mesh)
    return np.asarray(kernel(*arrays))


@pytest.mark.parametrize("shape", [(), (4,), (3, 5), (60, 70), (0, 3)])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, jnp.bfloat16, np.bool_])
def test_values_of_every_size_go_through_xla_and_come_back(shape, dtype):
    negate = primitive("negate", lambda x: jnp.logical_not(x) if x.dtype == bool else -x - x)
    x = (np.arange(np.prod(shape, dtype=int)) % 5).reshape(shape).astype(dtype)
    with pytest.warns(ThroughXlaWarning, match="'negate'"):
        out = run(negate.bind, x, out=x)
    np.testing.assert_array_equal(out, ~x if dtype == np.bool_ else -x - x)


def test_several_results_keep_their_order():
    split = primitive("split", lambda x: [x * 2, x[:1] + 1], multiple_results=True)
    x = np.arange(100, dtype=np.float32)

    def function(x):
        twice, first = split.bind(x)
        return twice + first

    with pytest.warns(ThroughXlaWarning):
        np.testing.assert_array_equal(run(function, x, out=x), x * 2 + 1)


def test_primitives_of_jax_without_a_rule_give_what_xla_gives():
    x = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)

    def function(x):
        lower = jnp.linalg.cholesky(x @ x.T + 6 * jnp.eye(6))
        values, vectors = jnp.linalg.eigh(x + x.T)
        return lower + vectors * values

    with pytest.warns(ThroughXlaWarning):
        out = run(function, x, out=x)
    np.testing.assert_allclose(out, jax.jit(function)(x), rtol=2e-4, atol=2e-4)


def test_64_bit_types_are_kept_where_they_are_enabled():
    with jax.enable_x64(True):
        root = primitive("root", jnp.sqrt)
        x = np.arange(50, dtype=np.float64)
        with pytest.warns(ThroughXlaWarning):
            np.testing.assert_array_equal(run(root.bind, x, out=x), np.sqrt(x))


def test_one_warning_names_the_primitive_the_program_and_the_users_line():
    odd = primitive("odd_one", lambda x: x + 1)
    x = np.zeros(4, np.float32)

    def twice(x_ref, out_ref):
        out_ref[...] = odd.bind(odd.bind(x_ref[...]))  # the use

    kernel = cokernel.kernel(twice, jax.ShapeDtypeStruct((4,), jnp.float32), mesh=MESH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(kernel(x), 2)
        np.testing.assert_array_equal(jax.jit(kernel)(x), 2)
    [text] = [str(w.message) for w in caught if w.category is ThroughXlaWarning]
    assert "'odd_one'" in text
    assert "program 'twice'" in text
    assert __file__ in text


def test_it_works_in_loops_with_every_core_and_several_workers():
    step = primitive("step", lambda x, y: x * 3 + y)
    mesh = cokernel.CoreMesh(core=4)

    def body(x_ref, out_ref):
        core = lax.axis_index("core")
        x = x_ref[core]
        out_ref[core] = lax.fori_loop(0, 5, lambda i, x: step.bind(x, i + core), x)

    x = np.arange(4, dtype=np.int32)
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((4,), jnp.int32),
        mesh=mesh,
        compiler_params=cokernel.CompilerParams(num_workers=4),
    )
    expected = x.copy()
    for i in range(5):
        expected = expected * 3 + i + np.arange(4)
    with pytest.warns(ThroughXlaWarning):
        np.testing.assert_array_equal(kernel(x), expected)


def test_a_primitive_of_refs_without_a_rule_is_refused_by_name():
    stir = Primitive("stir")
    stir.multiple_results = True
    stir.def_effectful_abstract_eval(lambda ref: ([], {_jax.WriteEffect(0)}))

    def body(out_ref):
        stir.bind(out_ref)

    kernel = cokernel.kernel(body, jax.ShapeDtypeStruct((4,), jnp.float32), mesh=MESH)
    with pytest.raises(NotImplementedError, match=r"(?s)'body'.*test_fallback.*'stir'.*Refs"):
        kernel()


def test_a_primitive_that_xla_does_not_know_either_is_refused_by_name():
    unknown = primitive("unheard_of", None)
    x = np.zeros(4, np.float32)
    with pytest.raises(NotImplementedError, match=r"(?s)'body'.*test_fallback.*'unheard_of'.*XLA"):
        run(unknown.bind, x, out=x)


def test_a_primitive_with_side_effects_is_refused_by_name():
    effect = _jax.pallas_primitives.sem_effect
    counted = primitive("counted", lambda x: x, effects=[effect])
    x = np.zeros(4, np.float32)
    with pytest.raises(NotImplementedError, match="'counted' has side effects"):
        run(counted.bind, x, out=x)


_BUSY = """
    import warnings
    import jax, jax.numpy as jnp, numpy as np
    from jax import lax
    import cokernel
    warnings.simplefilter("ignore")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", {devices})

    def body(x_ref, out_ref):
        core = lax.axis_index("core")
        x = x_ref[core]
        out_ref[core] = jnp.linalg.cholesky(x @ x.T + 8 * jnp.eye(8))

    kernel = cokernel.kernel(
        body, jax.ShapeDtypeStruct((2, 8, 8), jnp.float32), mesh=cokernel.CoreMesh(core=2)
    )

    def repeated(x):
        return lax.scan(lambda x, _: (kernel(x), None), x, length=20)[0]

    x = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    alone = np.asarray(jax.jit(repeated)(x))
    devices = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
    spec = jax.sharding.PartitionSpec("device")
    everywhere = jax.jit(
        jax.shard_map(
            lambda x: repeated(x[0])[None], mesh=devices, in_specs=spec, out_specs=spec,
            check_vma=False,
        )
    )
    many = np.broadcast_to(x, ({devices}, 2, 8, 8)).copy()
    for _ in range(3):
        np.testing.assert_array_equal(everywhere(many), np.broadcast_to(alone, many.shape))
    print("done")
"""


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_busy_threads_of_the_client_do_not_keep_it_waiting(devices):
    # More devices than processors, each in a scan, so that every thread of the client is taken.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_BUSY).format(devices=devices)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr
