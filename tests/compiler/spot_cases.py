"""What index arrays, masks and lanes pick of a Ref, also from the padding of its tiles, and
what numpy makes of the same.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu_sc as plsc

from cokernel import _jax

PL = _jax.pallas_primitives
# A register of the chip's vector subcores, and what so many wider ones hold.
LANES, MANY = 8, 96


@dataclasses.dataclass(frozen=True)
class Case:
    """Something that is done to a Ref, and what numpy makes of it.

    Attributes:
      shape: of the Ref.
      access: does it, to (the Ref, two numbers, indices, a mask, values), and returns what it read.
      model: the same of an array that has the padding, in which it also writes.
      indices: how many there are, and as many elements are in the mask and the values.
      room: what the indices, and each of the two numbers, stay below.
      is_vector: whether it is for a vector subcore.
    """

    shape: tuple[int, ...]
    access: Callable
    model: Callable
    indices: tuple[int, ...] = (LANES,)
    room: tuple[int, int, int] = (128, 1, 1)
    is_vector: bool = False


def padded(shape):
    """A shape of float32 rounded up to whole tiles of eight rows and 128 columns."""
    tiles = (128,) if len(shape) == 1 else (*[1] * (len(shape) - 2), 8, 128)
    return tuple(-(-extent // tile) * tile for extent, tile in zip(shape, tiles, strict=True))


def in_lanes(**options):
    return functools.partial(Case, (100,), is_vector=True, **options)


def added(whole, indices, keep, values):
    np.add.at(whole, indices[keep], values[keep])


def stored(whole, indices, keep, values):
    # Of equal indices the last one counts.
    for index, value in zip(indices[keep], values[keep], strict=True):
        whole[index] = value


def front(whole, start, keep):
    return whole[start : start + keep.sum()]


def expanded(whole, start, keep):
    result = np.zeros(keep.shape, np.float32)
    result[keep] = front(whole, start, keep)
    return result


def compressed(whole, start, keep, values, add):
    target = front(whole, start, keep)
    target[...] = target + values[keep] if add else values[keep]


def swapped(whole, window, keep, values):
    old = np.where(keep, whole[window], values)
    whole[window] = np.where(keep, values, whole[window])
    return old


def halves(numbers, module):
    """Halves of float32 as float32; those of what the padding is read as are not a number."""
    return module.where(numbers == -1, module.nan, numbers).astype(np.float32)


def gathered(block, i, j, at, keep, values):
    return jnp.where(keep, plsc.load_gather(block, [at], mask=keep), 0)


LANE_CASES = {
    f"{name}{' of many' * (count > LANES)}": in_lanes(indices=(count,))(access, model)
    for count in (LANES, MANY)
    for name, access, model in (
        (
            "scatter",
            lambda block, i, j, at, keep, values: plsc.store_scatter(
                block, [at], values, mask=keep
            ),
            lambda whole, i, j, at, keep, values: stored(whole, at, keep, values),
        ),
        (
            "sum by a scatter",
            lambda block, i, j, at, keep, values: plsc.addupdate_scatter(
                block, [at], values, mask=keep
            ),
            lambda whole, i, j, at, keep, values: added(whole, at, keep, values),
        ),
    )
}
CASES = {
    **LANE_CASES,
    "gather": in_lanes()(
        gathered, lambda whole, i, j, at, keep, values: np.where(keep, whole[at], 0)
    ),
    "gather from a window": in_lanes(room=(28, 101, 1))(
        lambda block, i, j, at, keep, values: gathered(
            block.at[pl.ds(i, 28)], i, j, at, keep, values
        ),
        lambda whole, i, j, at, keep, values: np.where(keep, whole[i:][at], 0),
    ),
    "gather without a mask": in_lanes()(
        lambda block, i, j, at, keep, values: plsc.load_gather(block, [at]),
        lambda whole, i, j, at, keep, values: whole[at],
    ),
    "gather of rows and columns": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: plsc.load_gather(block, [at % 16, at]),
        lambda whole, i, j, at, keep, values: whole[at % 16, at],
        is_vector=True,
    ),
    "expanded load": in_lanes(room=(1, 121, 1))(
        lambda block, i, j, at, keep, values: jnp.where(
            keep, plsc.load_expanded(block.at[pl.ds(i, LANES)], mask=keep), 0
        ),
        lambda whole, i, j, at, keep, values: expanded(whole, i, keep),
    ),
    "compressed store": in_lanes(room=(1, 121, 1))(
        lambda block, i, j, at, keep, values: plsc.store_compressed(
            block.at[pl.ds(i, LANES)], values, mask=keep
        ),
        lambda whole, i, j, at, keep, values: compressed(whole, i, keep, values, False),
    ),
    "compressed sum": in_lanes(room=(1, 121, 1))(
        lambda block, i, j, at, keep, values: plsc.addupdate_compressed(
            block.at[pl.ds(i, LANES)], values, mask=keep
        ),
        lambda whole, i, j, at, keep, values: compressed(whole, i, keep, values, True),
    ),
    "sum into a window": in_lanes(room=(1, 121, 1))(
        lambda block, i, j, at, keep, values: plsc.addupdate(block.at[pl.ds(i, LANES)], values),
        lambda whole, i, j, at, keep, values: added(
            whole, np.arange(i, i + LANES), np.ones(LANES, bool), values
        ),
    ),
    "masked load": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: PL.load(
            block, (pl.ds(i, 4), pl.ds(j, 8)), mask=keep, other=values
        ),
        lambda whole, i, j, at, keep, values: np.where(keep, whole[i : i + 4, j : j + 8], values),
        indices=(4, 8),
        room=(1, 13, 121),
    ),
    "masked store": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: PL.store(
            block, (pl.ds(i, 4), pl.ds(j, 8)), values, mask=keep
        ),
        lambda whole, i, j, at, keep, values: [
            swapped(whole, np.s_[i : i + 4, j : j + 8], keep, values)
        ][:0],
        indices=(4, 8),
        room=(1, 13, 121),
    ),
    "masked swap": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: PL.swap(
            block, (pl.ds(i, 4), pl.ds(j, 8)), values, mask=keep
        ),
        lambda whole, i, j, at, keep, values: swapped(
            whole, np.s_[i : i + 4, j : j + 8], keep, values
        ),
        indices=(4, 8),
        room=(1, 13, 121),
    ),
    "masked swap of all of a window": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: PL.swap(
            block.at[pl.ds(i, 4), pl.ds(j, 8)], (pl.ds(0, 4), pl.ds(0, 8)), values, mask=keep
        ),
        lambda whole, i, j, at, keep, values: swapped(
            whole, np.s_[i : i + 4, j : j + 8], keep, values
        ),
        indices=(4, 8),
        room=(1, 13, 121),
    ),
    "masked swap of a window of a window": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: PL.swap(
            block.at[i + 2, pl.ds(j, 16)], (pl.ds(i // 2, 8),), values, mask=keep
        ),
        lambda whole, i, j, at, keep, values: swapped(
            whole, np.s_[i + 2, j + i // 2 : j + i // 2 + 8], keep, values
        ),
        room=(1, 13, 113),
    ),
    "rows by an array": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: block[at],
        lambda whole, i, j, at, keep, values: whole[at, :100],
        room=(16, 1, 1),
    ),
    "rows by an array, of some columns": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: block[at, pl.ds(j, 16)],
        lambda whole, i, j, at, keep, values: whole[at, j : j + 16],
        room=(16, 1, 113),
    ),
    "columns by an array, then some rows": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: block.at[:, at][pl.ds(i, 4)],
        lambda whole, i, j, at, keep, values: whole[i : i + 4, at],
        room=(128, 13, 1),
    ),
    "columns by an array, then rows by another": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: block.at[:, at][at % 16],
        lambda whole, i, j, at, keep, values: whole[:, at][at % 16],
    ),
    "columns by an array, then some of them in a row": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: block.at[:, at][i, pl.ds(2, 4)],
        lambda whole, i, j, at, keep, values: whole[i, at[2:6]],
        room=(128, 16, 1),
    ),
    "elements by two arrays": Case(
        (3, 10, 100),
        lambda block, i, j, at, keep, values: block[i, at[:, None] % 16, at],
        lambda whole, i, j, at, keep, values: whole[i, at[:, None] % 16, at],
        room=(128, 3, 1),
    ),
    "every second row, picked": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: block.at[pl.ds(i, 4, 2)][at],
        lambda whole, i, j, at, keep, values: whole[i : i + 7 : 2, :100][at],
        room=(4, 10, 1),
    ),
    "store to rows by an array": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: block.__setitem__(
            at, jnp.broadcast_to(values[:, None], (LANES, 100))
        ),
        lambda whole, i, j, at, keep, values: stored(
            whole, at, np.ones(LANES, bool), np.broadcast_to(values[:, None], (LANES, 128))
        ),
        room=(16, 1, 1),
    ),
    "sum into elements by an array": Case(
        (100,),
        lambda block, i, j, at, keep, values: jax.ref.addupdate(block, at, values),
        lambda whole, i, j, at, keep, values: added(whole, at, np.ones(LANES, bool), values),
    ),
    "masked swap by an array": Case(
        (100,),
        lambda block, i, j, at, keep, values: PL.swap(block, (at,), values, mask=keep),
        lambda whole, i, j, at, keep, values: [
            np.where(keep, whole[at], values),
            stored(whole, at, keep, values),
        ][0],
    ),
    "a window under another shape": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: block.at[pl.ds(i, 4), pl.ds(j, 8)].reshape(2, 16)[
            :, pl.ds(3, 8)
        ],
        lambda whole, i, j, at, keep, values: whole[i : i + 4, j : j + 8].reshape(2, 16)[:, 3:11],
        room=(1, 13, 121),
    ),
    "a window turned, under another shape, picked": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: block.at[pl.ds(i, 4), pl.ds(j, 8)].T.reshape(4, 8)[
            at
        ],
        lambda whole, i, j, at, keep, values: whole[i : i + 4, j : j + 8].T.reshape(4, 8)[at],
        room=(4, 13, 121),
    ),
    "a window under another dtype": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: jax.lax.bitcast_convert_type(
            block.at[pl.ds(i, 4), pl.ds(j, 8)].bitcast(jnp.int32)[...], jnp.float32
        ),
        lambda whole, i, j, at, keep, values: whole[i : i + 4, j : j + 8],
        room=(1, 13, 121),
    ),
    "a window under a narrower dtype": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: halves(
            block.at[pl.ds(i, 4), pl.ds(j, 8)].bitcast(jnp.int16)[...], jnp
        ),
        lambda whole, i, j, at, keep, values: halves(
            whole[i : i + 4, j : j + 8]
            .copy()
            .view(np.int16)
            .reshape(4, 8, 2)
            .transpose(0, 2, 1)
            .reshape(8, 8),
            np,
        ),
        room=(1, 13, 121),
    ),
    "a window of a Ref under another dtype": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: jax.lax.bitcast_convert_type(
            block.bitcast(jnp.int32)[pl.ds(i, 4), pl.ds(j, 8)], jnp.float32
        ),
        lambda whole, i, j, at, keep, values: whole[i : i + 4, j : j + 8],
        room=(1, 13, 121),
    ),
    "store to a window under another shape": Case(
        (10, 100),
        lambda block, i, j, at, keep, values: (
            block.at[pl.ds(i, 4), pl.ds(j, 8)].reshape(32).__setitem__(pl.ds(5, 8), values)
        ),
        lambda whole, i, j, at, keep, values: [
            whole.__setitem__((i + n // 8, j + n % 8), value)
            for n, value in enumerate(values, start=5)
        ][:0],
        room=(1, 13, 121),
    ),
}
