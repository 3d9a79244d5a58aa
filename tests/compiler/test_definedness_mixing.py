"""Operations that mix elements make undefined what depends on undefined elements, and no more."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel.compiler import definedness_rules
from cokernel.compiler.ops.registry import RULES


def decide(elements: Any, places: np.ndarray) -> None:
    """Lets a program branch on some elements of a Ref, one by one."""
    for place in zip(*np.nonzero(places), strict=True):
        pl.when(elements[tuple(map(int, place))] > 0)(lambda: None)


def findings_of(case: "Case") -> list[cokernel.Finding]:
    """What is found while a program applies a function to what was written of an argument, and
    branches on each element of the result: those that are to be undefined on the second line.
    """
    values = np.broadcast_to(np.asarray(case.value, case.dtype), case.undefined.shape)
    argument = jax.ShapeDtypeStruct(case.undefined.shape, case.dtype)
    with cokernel.target("tpu7x"):
        result = jax.eval_shape(case.function, argument)
    assert result.shape == case.expected.shape

    def body(out_ref, argument, result):
        for place in zip(*np.nonzero(~case.undefined), strict=True):
            argument[tuple(map(int, place))] = values[place]
        result[...] = case.function(argument[...])
        decide(result, ~case.expected)
        decide(result, case.expected)
        out_ref[0] = 0

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[pltpu.VMEM(a.shape, a.dtype) for a in (argument, result)],
    )
    options = cokernel.Checked(chip_limits="off")
    with cokernel.target("tpu7x"):
        report = cokernel.explore(kernel, schedules=1, options=options)
    assert not report.not_checked
    return list(report.findings)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, which elements of its argument are undefined, and which of its result are."""

    function: Callable[[Any], Any]
    undefined: Any
    expected: Any
    value: Any = 1.0
    dtype: Any = jnp.float32


def lanes(*undefined: int, count: int = 8) -> np.ndarray:
    mask = np.zeros(count, bool)
    mask[list(undefined)] = True
    return mask


def grid(*undefined: tuple[int, int], shape: tuple[int, int] = (4, 8)) -> np.ndarray:
    mask = np.zeros(shape, bool)
    for place in undefined:
        mask[place] = True
    return mask


def convolve(x: Any, weights: Any, **params: Any) -> Any:
    return lax.conv_general_dilated(x, weights, **{"padding": "VALID", **params})


SIGNAL = np.zeros((2, 2, 8), bool)
SIGNAL[1, 0, 3] = True
NEAR = np.zeros((2, 4, 6), bool)
NEAR[1, :, 1:4] = True
GROUPED = NEAR.copy()
GROUPED[1, 2:] = False
FILTER = np.zeros((4, 2, 3), bool)
FILTER[2, 1, 0] = True
ONE_FEATURE = np.zeros((2, 4, 6), bool)
ONE_FEATURE[:, 2] = True
FIRST_HALF = np.arange(8) < 4

CASES = {
    "a pool": Case(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (2,), "VALID"),
        lanes(3),
        lanes(1, count=4),
    ),
    "an overlapping pool": Case(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3,), (1,), "SAME"),
        lanes(0, 5),
        lanes(0, 1, 4, 5, 6),
    ),
    "a dilated pool": Case(
        lambda x: lax.reduce_window(
            x, jnp.inf, lax.min, (2,), (1,), ((1, 0),), base_dilation=(2,), window_dilation=(2,)
        ),
        lanes(1),
        # Windows are two elements two places apart, of elements two places apart after one.
        lanes(1, 3, count=14),
    ),
    "prefixes by windows": Case(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (8,), (1,), ((7, 0),)),
        lanes(5),
        lanes(5, 6, 7),
    ),
    "windows folded by a function": Case(
        lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b + b, (2,), (2,), "VALID"),
        lanes(6),
        lanes(3, count=4),
    ),
    "rows folded by a function": Case(
        lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + a, (1,)), grid((2, 7)), lanes(2, count=4)
    ),
    "a pool that is differentiated": Case(
        jax.grad(
            lambda x: (
                jnp.arange(4.0) * lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID")
            ).sum()
        ),
        lanes(5),
        lanes(4, 5),
        value=np.arange(8),
    ),
    "the tangent of a pool": Case(
        lambda x: jax.jvp(
            lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2,), (2,), "VALID"),
            (jnp.arange(8.0),),
            (x,),
        )[1],
        lanes(5),
        lanes(2, count=4),
    ),
    "a convolution": Case(
        lambda x: convolve(x, jnp.ones((4, 2, 3)), window_strides=(1,)), SIGNAL, NEAR
    ),
    "a convolution in groups": Case(
        lambda x: convolve(x, jnp.ones((4, 1, 3)), window_strides=(1,), feature_group_count=2),
        SIGNAL,
        GROUPED,
    ),
    "a convolution of groups of the batch": Case(
        lambda x: convolve(x, jnp.ones((4, 2, 3)), window_strides=(1,), batch_group_count=2),
        SIGNAL,
        np.roll(GROUPED[1:], 2, axis=1),
    ),
    "a convolution with strides and padding": Case(
        lambda x: convolve(x, jnp.ones((4, 2, 3)), window_strides=(2,), padding=((1, 1),)),
        SIGNAL,
        np.stack([np.zeros((4, 4), bool), np.tile(lanes(1, 2, count=4), (4, 1))]),
    ),
    "the weights of a convolution": Case(
        lambda w: convolve(jnp.ones((2, 2, 8)), w, window_strides=(1,)), FILTER, ONE_FEATURE
    ),
    "a convolution with features last": Case(
        lambda x: convolve(
            x,
            jnp.ones((3, 2, 4)),
            window_strides=(1,),
            dimension_numbers=("NHC", "HIO", "NHC"),
        ),
        np.swapaxes(SIGNAL, 1, 2),
        np.swapaxes(NEAR, 1, 2),
    ),
    "the rows of groups": Case(
        lambda x: lax.ragged_dot(x, jnp.ones((2, 8, 3)), jnp.arange(1, 3)),
        grid((1, 5), (3, 0)),
        np.tile((np.arange(4) == 1)[:, None], (1, 3)),
    ),
    "the matrices of groups": Case(
        lambda w: lax.ragged_dot(jnp.ones((3, 4)), w.reshape(2, 4, 4), jnp.arange(1, 3)),
        grid((1, 2)),
        np.tile(np.arange(4) == 2, (3, 1)),
    ),
    "the greatest": Case(
        lambda x: lax.top_k(x, 2)[0], grid((1, 5)), np.tile((np.arange(4) == 1)[:, None], (1, 2))
    ),
    "where the greatest are": Case(
        lambda x: lax.top_k(x, 2)[1], grid((1, 5)), np.tile((np.arange(4) == 1)[:, None], (1, 2))
    ),
    "about the greatest": Case(
        lambda x: lax.approx_max_k(x, 2, reduction_dimension=0)[0],
        grid((1, 5)),
        np.tile(np.arange(8) == 5, (2, 1)),
    ),
    "what is sorted by other keys": Case(
        lambda x: lax.sort_key_val(jnp.arange(8, 0, -1), x)[1], lanes(1, 2), lanes(5, 6)
    ),
    "what is applied to an element": Case(
        lambda x: x.at[jnp.arange(2, 6, 3)].apply(lambda y: y + 1), lanes(2, 3), lanes(2, 3)
    ),
    "what is subtracted": Case(
        lambda x: jnp.ones(8).at[jnp.arange(2, 6, 3)].subtract(x[:2]), lanes(1), lanes(5)
    ),
    "random bits of keys": Case(
        lambda x: jax.random.bits(jax.random.wrap_key_data(x), (2,)),
        lanes(1, count=2),
        lanes(0, 1, count=2),
        dtype=jnp.uint32,
    ),
    "the incomplete gamma function": Case(
        lambda x: lax.igamma(x, jnp.ones(8)), lanes(1, 2), lanes(1, 2)
    ),
    "packing by words": Case(
        lambda x: pltpu.pack_elementwise([x, jnp.ones(8)], packed_dtype=jnp.bfloat16),
        lanes(1, 2),
        lanes(1, 2),
    ),
    "unpacking of words": Case(
        lambda x: pltpu.unpack_elementwise(
            x, index=1, packed_dtype=jnp.bfloat16, unpacked_dtype=jnp.float32
        ),
        lanes(1, 2),
        lanes(1, 2),
        dtype=jnp.uint32,
    ),
    "rounding at random": Case(
        lambda x: pltpu.stochastic_round(
            x, jnp.arange(8, dtype=jnp.uint32), target_dtype=jnp.bfloat16
        ),
        lanes(1, 2),
        lanes(1, 2),
    ),
    "rows under a narrower dtype": Case(
        lambda x: pltpu.bitcast(x, jnp.int16),
        grid((1, 5)),
        np.repeat(grid((1, 5)), 2, axis=0),
        dtype=jnp.int32,
    ),
    "rows under a wider dtype": Case(
        lambda x: pltpu.bitcast(x, jnp.int32),
        grid((1, 5)),
        grid((0, 5), shape=(2, 8)),
        dtype=jnp.int16,
    ),
    "a masked prefix sum": Case(
        lambda x: plsc.cumsum(x, mask=jnp.arange(8) != 2),
        lanes(2, 5),
        lanes(5, 6, 7),
    ),
    "a masked prefix maximum": Case(
        lambda x: plsc.cummax(x, mask=jnp.arange(8) > 2),
        lanes(1, 5),
        lanes(1, 5, 6, 7),
    ),
    "counts of equal lanes": Case(
        lambda x: plsc.scan_count(x, jnp.arange(8) != 1)[0],
        lanes(1, 5),
        lanes(1, 5, 6, 7),
        dtype=jnp.int32,
    ),
    "whether a lane is the last of equals": Case(
        lambda x: plsc.scan_count(x, jnp.arange(8) != 1)[1].astype(jnp.int32),
        lanes(1),
        lanes(),
        dtype=jnp.int32,
    ),
    "the keys of a masked sort": Case(
        lambda x: plsc.sort_key_val(x, jnp.arange(16.0), mask=jnp.arange(16) < 14)[0],
        lanes(14, count=16),
        lanes(14, count=16),
        value=np.arange(16, 0, -1),
    ),
    "the values of a masked sort": Case(
        lambda x: plsc.sort_key_val(jnp.arange(16, 0, -1, dtype=jnp.int32), x)[1],
        lanes(1, 2, count=16),
        lanes(13, 14, count=16),
    ),
    "a masked sort by an undefined key": Case(
        lambda x: plsc.sort_key_val(x, jnp.arange(16.0), mask=jnp.arange(16) < 14)[1],
        lanes(3, count=16),
        lanes(*range(16), count=16),
    ),
    "interleaved halves": Case(
        lambda x: plsc.pack(
            x, jnp.ones(8), format=plsc.PackFormat.INTERLEAVED, preferred_element_type=jnp.bfloat16
        ).reshape(16),
        lanes(3),
        lanes(6, count=16),
    ),
    "what was interleaved": Case(
        lambda x: plsc.unpack(
            x, format=plsc.PackFormat.INTERLEAVED, preferred_element_type=jnp.float32
        )[1],
        lanes(3, 6, count=16),
        lanes(1),
        dtype=jnp.bfloat16,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_exactly_what_depends_on_undefined_elements_is_undefined(name):
    found = findings_of(CASES[name])
    if not CASES[name].expected.any():
        assert not found
        return
    [finding] = found
    assert (finding.kind, finding.name) == ("UninitialisedRead", "argument")
    acting = [party for party in finding.parties if party is not finding.allocation]
    lines = [caller["code"] for party in acting for caller in party.callers]
    assert lines == ["decide(result, case.expected)"], finding.text()
    assert finding.occurrences == CASES[name].expected.sum()


# Each of these takes nothing but Refs, or gives nothing: there is no mask to carry.
WITHOUT_A_RULE = {
    "add_dependency": "orders what touches a Ref",
    "barrier": "takes no values",
    "dce_sink": "has no result, and does nothing",
    "get_barrier_semaphore": "takes no values",
    "has_memory_space": "asks for the space of a Ref",
    "iota": "takes no values",
    "iota_2x32_shape": "takes no values",
    "num_programs": "takes no values",
    "platform_index": "takes no values",
    "prng_random_bits": "takes no values: the seed was looked at when it was set",
    "trace_value": "has no result, and is a mark for a profiler that sees nothing of it",
}


def test_every_primitive_has_a_rule_unless_it_carries_no_values():
    definedness_rules.load()
    without = {primitive.name for primitive in RULES if primitive not in definedness_rules.RULES}
    assert without == set(WITHOUT_A_RULE)


def test_an_undefined_seed_is_told_where_it_is_set():
    def body(out_ref, seed):
        pltpu.prng_seed(seed[1])
        out_ref[...] = pltpu.prng_random_bits((8,))

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((8,), jnp.int32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[pltpu.SMEM((2,), jnp.int32)],
    )
    [finding] = cokernel.explore(kernel, schedules=1).findings
    assert (finding.kind, finding.name, finding.indices) == ("UninitialisedRead", "seed", "[1]")
    assert finding.parties[0].code == "pltpu.prng_seed(seed[1])"


@pytest.mark.parametrize("is_used", [True, False])
def test_an_empty_array_is_undefined_until_it_is_filled(is_used):
    def body(x_ref, out_ref):
        empty = lax.empty((8,), jnp.float32)
        filled = empty.at[:4].set(x_ref[0:4])
        out_ref[...] = filled if is_used else jnp.where(jnp.arange(8) < 4, filled, 0.0)

    kernel = cokernel.kernel(
        body, jax.ShapeDtypeStruct((8,), jnp.float32), mesh=cokernel.CoreMesh(core=1)
    )
    report = cokernel.explore(kernel, jnp.ones(8), schedules=1)
    assert not report.not_checked
    if is_used:
        [finding] = report.findings
        assert (finding.kind, finding.name) == ("UninitialisedRead", "lax.empty")
        assert finding.allocation.code == "empty = lax.empty((8,), jnp.float32)"
    else:
        assert report.is_clean
    native = kernel(jnp.ones(8))
    np.testing.assert_array_equal(native, [1, 1, 1, 1, 0, 0, 0, 0])
