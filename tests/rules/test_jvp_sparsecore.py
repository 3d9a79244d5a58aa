"""Forward mode of what only vector subcores do equals that of the same mathematics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _jax

LANES = 8  # Of a v6e.
F32, I32 = jnp.float32, jnp.int32
WHOLE = pl.ds(0, LANES)
VECTOR = jax.ShapeDtypeStruct((LANES,), F32)
X = jnp.asarray([0.5, -1.0, 3.0, 2.0, 2.5, -4.0, 7.0, 1.0], F32)
Y = jnp.asarray([2.0, 1.5, -0.75, 4.0, -3.0, 0.25, 1.0, -2.0], F32)
TANGENT = jnp.asarray([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], F32)
INDICES = jnp.asarray([7, 0, 3, 3, 1, 6, 2, 5], I32)
MASK = jnp.asarray([0, 1, 1, 0, 1, 1, 0, 1], I32)


def on_subcore(body, *ints, outputs=(VECTOR,)):
    """Makes a function of two float vectors from a body of Refs in the memory of one subcore."""
    with cokernel.target("v6e"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
        )

    def whole(*refs):
        count = 2 + len(ints) + len(outputs)
        outside, inside = refs[:count], refs[count:]
        for source, target in zip(outside[: -len(outputs)], inside, strict=False):
            pltpu.sync_copy(source, target)
        body(*inside)
        for source, target in zip(inside[-len(outputs) :], outside[-len(outputs) :], strict=True):
            pltpu.sync_copy(source, target)

    scratch = [pltpu.VMEM((LANES,), F32)] * 2
    scratch += [pltpu.VMEM((LANES,), I32)] * len(ints)
    scratch += [pltpu.VMEM(out.shape, out.dtype) for out in outputs]
    with cokernel.target("v6e"):
        kernel = cokernel.kernel(whole, list(outputs), mesh=mesh, scratch_types=scratch)
    return lambda x, y: kernel(x, y, *ints)


def assert_same_derivatives(fn, reference, *args, rtol=1e-6):
    tangents = (TANGENT, 0.5 * TANGENT[::-1])

    def first(fn, *args):
        return jax.jvp(fn, args, tangents)

    def second(fn, *args):
        return jax.jvp(functools.partial(first, fn), args, tangents)

    for derivative in (first, second):
        got = jax.tree.leaves(derivative(fn, *args))
        wanted = jax.tree.leaves(derivative(reference, *args))
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_gathers(masked):
    def body(x_ref, y_ref, i_ref, m_ref, o_ref):
        o_ref[...] = y_ref[...]
        mask = m_ref[...] != 0 if masked else None
        found = plsc.load_gather(x_ref, [i_ref[...]], mask=mask)
        kept = found if mask is None else jnp.where(mask, found, 1.0)
        o_ref[...] = o_ref[...] * kept * kept

    def reference(x, y):
        found = x[INDICES]
        if masked:
            found = jnp.where(MASK != 0, found, 1.0)
        return [y * found * found]

    assert_same_derivatives(on_subcore(body, INDICES, MASK), reference, X, Y)


@pytest.mark.parametrize("add", [False, True])
def test_scatters(add):
    permutation = jnp.asarray([3, 0, 7, 1, 2, 6, 5, 4], I32)

    def body(x_ref, y_ref, i_ref, m_ref, o_ref):
        o_ref[...] = y_ref[...] * y_ref[...]
        store = plsc.addupdate_scatter if add else plsc.store_scatter
        store(o_ref, [i_ref[...]], x_ref[...] * x_ref[...], mask=m_ref[...] != 0)

    def reference(x, y):
        out, where = y * y, permutation[MASK != 0]
        chosen = (x * x)[MASK != 0]
        return [out.at[where].add(chosen) if add else out.at[where].set(chosen)]

    assert_same_derivatives(on_subcore(body, permutation, MASK), reference, X, Y)


@pytest.mark.parametrize("add", [False, True])
def test_expanded_loads_and_compressed_stores(add):
    def body(x_ref, y_ref, m_ref, o_ref):
        mask = m_ref[...] != 0
        loaded = jnp.where(mask, plsc.load_expanded(x_ref.at[WHOLE], mask=mask), 0.0)
        o_ref[...] = y_ref[...] * loaded
        store = plsc.addupdate_compressed if add else plsc.store_compressed
        store(o_ref.at[WHOLE], x_ref[...] * y_ref[...], mask=mask)

    chosen = np.flatnonzero(MASK)

    def reference(x, y):
        out = y * jnp.zeros_like(x).at[chosen].set(x[: len(chosen)])
        stored = (x * y)[chosen]
        head = out[: len(chosen)] + stored if add else stored
        return [out.at[: len(chosen)].set(head)]

    assert_same_derivatives(on_subcore(body, MASK), reference, X, Y)


def test_adding_to_memory():
    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] * x_ref[...]
        plsc.addupdate(o_ref.at[WHOLE], x_ref[...] * y_ref[...])

    assert_same_derivatives(on_subcore(body), lambda x, y: [x * x + x * y], X, Y)


def test_cumulative_sums():
    def body(x_ref, y_ref, m_ref, o_ref):
        o_ref[...] = plsc.cumsum(x_ref[...] * y_ref[...], mask=m_ref[...] != 0)

    def reference(x, y):
        return [jnp.cumsum(jnp.where(MASK != 0, x * y, 0.0))]

    assert_same_derivatives(on_subcore(body, MASK), reference, X, Y, rtol=1e-5)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
@pytest.mark.parametrize("mask", [MASK, jnp.ones_like(MASK), jnp.zeros_like(MASK)], ids=str)
def test_cumulative_extremes_have_the_tangent_of_the_element_that_they_are(name, mask):
    def body(x_ref, y_ref, m_ref, o_ref):
        o_ref[...] = getattr(_jax.sc_primitives, name)(
            x_ref[...] * y_ref[...], mask=m_ref[...] != 0
        )

    def reference(x, y):
        product, out, best = x * y, [], None
        better = np.greater if name == "cummax" else np.less
        for lane in range(LANES):
            if mask[lane] and (best is None or better(values[lane], values[best])):
                best = lane
            out.append(product[lane if best is None else best])
        return [jnp.stack(out)]

    values = np.asarray(X * Y)
    assert_same_derivatives(on_subcore(body, mask), reference, X, Y)


@pytest.mark.parametrize("descending", [False, True])
def test_sorting_moves_tangents_with_their_values(descending):
    def body(x_ref, y_ref, keys_ref, values_ref):
        keys_ref[...], values_ref[...] = plsc.sort_key_val(
            x_ref[...] * x_ref[...] * x_ref[...], y_ref[...] * y_ref[...], descending=descending
        )

    order = np.argsort(np.asarray(X))[:: -1 if descending else 1]

    def reference(x, y):
        return [(x * x * x)[order], (y * y)[order]]

    assert_same_derivatives(on_subcore(body, outputs=(VECTOR, VECTOR)), reference, X, Y)


def test_sorting_integers_along_moves_the_tangents_of_keys():
    def body(x_ref, y_ref, i_ref, o_ref):
        keys, indices = plsc.sort_key_val(x_ref[...], i_ref[...])
        o_ref[...] = keys * indices.astype(F32) * y_ref[...]

    order = np.argsort(np.asarray(X))

    def reference(x, y):
        return [x[order] * INDICES[order] * y]

    assert_same_derivatives(on_subcore(body, INDICES), reference, X, Y)


@pytest.mark.parametrize("layout", plsc.PackFormat)
def test_packing_and_unpacking(layout):
    def body(x_ref, y_ref, o_ref, p_ref):
        packed = plsc.pack(x_ref[...], y_ref[...], format=layout)
        first, second = plsc.unpack(packed, format=layout)
        o_ref[...], p_ref[...] = first * first, second * x_ref[...]

    fn = on_subcore(body, outputs=(VECTOR, VECTOR))
    # All of these numbers are bfloat16 as well.
    assert_same_derivatives(fn, lambda x, y: [x * x, y * x], X, Y)


@pytest.mark.parametrize("carried", [False, True])
def test_parallel_loops(carried):
    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...]
        if carried:

            def step(i, carry):
                total, count = carry
                return total * x_ref[...] + y_ref[...], count + i

            start = (y_ref[...], jnp.int32(0))
            total, count = plsc.parallel_loop(0, 3, carry=start)(step)
            o_ref[...] = total * count.astype(F32)
        else:

            @plsc.parallel_loop(0, 2)
            def _(i):
                o_ref[...] = o_ref[...] * y_ref[...]

    def reference(x, y):
        if not carried:
            return [x * y * y]
        total = y
        for _ in range(3):
            total = total * x + y
        return [total * 3.0]

    assert_same_derivatives(on_subcore(body), reference, X, Y, rtol=1e-5)


def test_gathers_by_dma():
    rows = 16
    with cokernel.target("v6e"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=2
        )

        def lookup(table_ref, ids_ref, o_ref, ids, lines, done):
            me = lax.axis_index("subcore")
            pltpu.sync_copy(ids_ref.at[pl.ds(me * LANES, LANES)], ids)
            pltpu.async_copy(table_ref.at[ids], lines, done).wait()

            @pl.loop(0, LANES)
            def _(row):
                lines[row] = lines[row] * lines[row]

            pltpu.sync_copy(lines, o_ref.at[pl.ds(me * LANES, LANES)])

        kernel = cokernel.kernel(
            lookup,
            jax.ShapeDtypeStruct((2 * LANES, LANES), F32),
            mesh=mesh,
            scratch_types=[
                pltpu.VMEM((LANES,), I32),
                pltpu.VMEM((LANES, LANES), F32),
                pltpu.SemaphoreType.DMA,
            ],
        )
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(rows, LANES)), F32)
    ids = jnp.asarray(rng.integers(0, rows, 2 * LANES), I32)
    for one, other in zip(
        jax.jvp(lambda t: kernel(t, ids), (table,), (2.0 * table,)),
        jax.jvp(lambda t: t[ids] ** 2, (table,), (2.0 * table,)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_numbers_packed_as_integers_are_refused_with_the_line():
    def body(x_ref, y_ref, o_ref):
        packed = plsc.pack(
            x_ref[...],
            y_ref[...],
            format=plsc.PackFormat.INTERLEAVED,
            preferred_element_type=jnp.int16,
        )
        o_ref[...] = packed[:LANES].astype(F32)

    with pytest.raises(
        NotImplementedError, match=r"pack to int16 has no derivative.*test_jvp_sparsecore.py:\d+\)"
    ):
        jax.jvp(on_subcore(body), (X, Y), (X, Y))
