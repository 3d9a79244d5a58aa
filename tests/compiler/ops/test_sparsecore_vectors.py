"""Vector operations of a SparseCore give what numpy gives element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu_sc as plsc

from cokernel import _jax
from tests.compiler import tolerance
from tests.compiler.harness import run
from tests.compiler.ops.sparsecore_harness import CHIPS, run_on_subcore

SC = _jax.sc_primitives
chips = pytest.mark.parametrize("chip", CHIPS)
DTYPES = [np.int32, np.uint32, np.float32]


def shaped(shape, dtype=np.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def run_vector(chip, function, results, *arrays):
    """The results of a function of vectors, on a subcore."""

    def body(*refs):
        inputs, outputs = refs[: len(arrays)], refs[len(arrays) :]
        values = function(*(ref[...] for ref in inputs))
        for output, value in zip(outputs, values, strict=True):
            output[...] = value

    return run_on_subcore(chip, body, results, *arrays)


def few_values(dtype):
    """Few enough values that some come twice, among them the extremes."""
    if dtype == np.float32:
        return st.sampled_from([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf])
    info = np.iinfo(dtype)
    return st.sampled_from([0, 1, 2, 7, info.min, info.max])


@st.composite
def vectors(draw, lanes, dtype):
    values = draw(st.lists(few_values(dtype), min_size=lanes, max_size=lanes))
    mask = draw(st.lists(st.booleans(), min_size=lanes, max_size=lanes))
    return np.asarray(values, dtype), np.asarray(mask)


SCANS = {
    "cumsum": (plsc.cumsum, np.cumsum),
    "cummax": (plsc.cummax, np.maximum.accumulate),
    "cummin": (_jax.sc_primitives.cummin, np.minimum.accumulate),
}


def scanned(name, x, mask):
    """What a masked prefix scan gives, by its definition."""
    scan = SCANS[name][1]
    result = np.zeros_like(x) if name == "cumsum" else x.copy()
    with np.errstate(over="ignore"):
        for lane in range(x.size):
            eligible = x[: lane + 1][mask[: lane + 1]]
            if eligible.size:
                result[lane] = scan(eligible, dtype=x.dtype)[-1]
    return result


@chips
@pytest.mark.parametrize("name", SCANS)
@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_masked_scans_leave_out_what_the_mask_does(chip, name, data, dtype):
    lanes = CHIPS[chip]
    x, mask = data.draw(vectors(lanes, dtype))
    if name == "cumsum" and dtype == np.float32:
        x = np.where(np.isinf(x), 3, x).astype(dtype)
    [got] = run_vector(
        chip, lambda x, m: [SCANS[name][0](x, mask=m != 0)], [x], x, mask.astype(np.int32)
    )
    np.testing.assert_array_equal(got, scanned(name, x, mask))
    tolerance.note(getattr(SC, f"masked_{name}_p"), dtype, 0.0)


@pytest.mark.parametrize("name", SCANS)
def test_scans_without_a_mask_and_of_long_vectors(name):
    x = np.random.default_rng(0).integers(-9, 9, 200).astype(np.int32)
    mask = x % 3 == 0
    scan = SCANS[name][0]
    got = run(lambda x, m: (scan(x), scan(x, mask=m), scan(x[:7])), x, mask)
    everything = np.ones(200, bool)
    np.testing.assert_array_equal(got[0], scanned(name, x, everything))
    np.testing.assert_array_equal(got[1], scanned(name, x, mask))
    np.testing.assert_array_equal(got[2], scanned(name, x[:7], everything[:7]))


def occurrences(x, mask):
    counts, last = np.zeros(x.size, np.int32), np.zeros(x.size, bool)
    for lane in range(x.size):
        same = mask & (x == x[lane])
        counts[lane] = same[: lane + 1].sum()
        last[lane] = mask[lane] and not same[lane + 1 :].any()
    return counts, last


@chips
@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_scan_count_counts_equal_eligible_elements(chip, data, dtype):
    lanes = CHIPS[chip]
    x, mask = data.draw(vectors(lanes, dtype))

    def count(x, m):
        counts, last = plsc.scan_count(x, m != 0)
        return counts, last.astype(jnp.int32)

    got = run_vector(chip, count, [shaped((lanes,))] * 2, x, mask.astype(np.int32))
    counts, last = occurrences(x, mask)
    np.testing.assert_array_equal(got[0], counts)
    np.testing.assert_array_equal(got[1], last)
    tolerance.note(SC.scan_count_p, dtype, 0.0)


def test_scan_count_of_a_long_vector():
    x = np.random.default_rng(0).integers(0, 5, 100).astype(np.int32)
    mask = np.arange(100) % 4 != 0
    got = run(lambda x, m: plsc.scan_count(x, m), x, mask)
    for ours, theirs in zip(got, occurrences(x, mask), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@chips
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_sort_key_val_is_stable_and_puts_invalid_lanes_last(chip, descending, masked, data, dtype):
    lanes = CHIPS[chip]
    keys, mask = data.draw(vectors(lanes, dtype))
    values = np.arange(lanes, dtype=np.int32)
    mask = mask if masked else np.ones(lanes, bool)

    def sort(k, v, m):
        if not masked:
            return *plsc.sort_key_val(k, v, descending=descending), m
        k, v, m = plsc.sort_key_val(k, v, mask=m != 0, descending=descending)
        return k, v, m.astype(jnp.int32)

    types = [keys, values, shaped((lanes,))]
    got = run_vector(chip, sort, types, keys, values, mask.astype(np.int32))
    valid = np.flatnonzero(mask)
    if descending:
        order = valid[::-1][np.argsort(keys[valid][::-1], kind="stable")][::-1]
    else:
        order = valid[np.argsort(keys[valid], kind="stable")]
    order = np.concatenate([order, np.flatnonzero(~mask)])
    np.testing.assert_array_equal(got[0], keys[order])
    np.testing.assert_array_equal(got[1], values[order])
    np.testing.assert_array_equal(got[2], np.arange(lanes) < mask.sum())
    tolerance.note(SC.masked_sort_p, dtype, 0.0)


def test_sort_key_val_puts_nans_behind_all_numbers():
    keys = np.asarray([np.nan, 1, -np.inf, np.inf, -np.nan, 0, -0.0, 2], np.float32)
    got = run_vector(
        "v6e", plsc.sort_key_val, [keys, shaped((8,))], keys, np.arange(8, dtype=np.int32)
    )
    np.testing.assert_array_equal(got[1], [2, 5, 6, 1, 7, 3, 0, 4])


@pytest.mark.parametrize("reduce", [1, 2, 8])
@pytest.mark.parametrize("count", [8, 16, 64, 104])
@pytest.mark.parametrize("kind", ["none", "some", "last", "all"])
def test_reductions_of_masks_hold_the_number_in_every_lane(reduce, count, kind):
    mask = {
        "none": np.zeros(count, bool),
        "some": np.arange(count) % 3 == 2,
        "last": np.arange(count) == count - 1,
        "all": np.ones(count, bool),
    }[kind]

    def both(m):
        return (
            plsc.all_reduce_population_count(m, reduce=reduce),
            plsc.all_reduce_ffs(m, reduce=reduce),
        )

    total, first = run(both, mask)
    np.testing.assert_array_equal(total, np.full(count // reduce, mask.sum()))
    expected = mask.argmax() if mask.any() else count
    np.testing.assert_array_equal(first, np.full(count // reduce, expected))
    tolerance.note(SC.all_reduce_population_count_p, np.bool_, 0.0)
    tolerance.note(SC.all_reduce_ffs_p, np.bool_, 0.0)


FORMATS = {
    plsc.PackFormat.INTERLEAVED: lambda a, b: np.stack([a, b], 1).ravel(),
    plsc.PackFormat.COMPRESSED: lambda a, b: np.concatenate([a, b]).reshape(-1, 2),
}
PACKED = [
    (np.float32, None, jnp.bfloat16),
    (np.float32, jnp.float16, jnp.float16),
    (np.int32, None, np.int16),
    (np.int32, jnp.uint16, np.uint16),
]


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize(("wide", "preferred", "narrow"), PACKED)
@pytest.mark.parametrize("count", [1, 8, 16, 100])
def test_pack_narrows_and_arranges_and_unpack_undoes_it(layout, wide, preferred, narrow, count):
    a = (np.arange(count) * 1.01 + 70000 * (np.arange(count) % 2)).astype(wide)
    b = (-a).astype(wide)

    def both(a, b):
        packed = plsc.pack(a, b, format=layout, preferred_element_type=preferred)
        return packed, *plsc.unpack(packed, format=layout, preferred_element_type=wide)

    packed, first, second = run(both, a, b)
    narrow_a, narrow_b = (np.asarray(jnp.asarray(x).astype(narrow)) for x in (a, b))
    assert packed.dtype == narrow
    np.testing.assert_array_equal(packed, FORMATS[layout](narrow_a, narrow_b))
    np.testing.assert_array_equal(first, narrow_a.astype(wide))
    np.testing.assert_array_equal(second, narrow_b.astype(wide))
    tolerance.note(SC.pack_p, wide, 0.0)
    tolerance.note(SC.unpack_p, narrow, 0.0)
