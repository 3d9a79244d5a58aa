"""The padding of tiles, for checked mode with `padded_tiles`.

On a TPU an array ends with a whole tile. JAX's interpreter lets a window reach into what is left of
that tile: what is read there is anything, and what is written there is lost. Here nothing lies
there, so that a window is cut off where the Ref ends, and the rest of it made up.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes, nests
from cokernel.compiler.dtypes import i1, i8, i32, i64, pointer, void
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.values import (
    Buffer,
    Value,
    is_small,
    load_element,
    make_packed,
    pack,
    row_major,
    store_element,
)
from cokernel.records import record

if TYPE_CHECKING:
    from cokernel.checking.options import Checked
    from cokernel.compiler.context import Context
    from cokernel.compiler.refs import Overhang, RefValue, View

# What JAX has tiles for.
WIDEST_ELEMENT = 4


def padded_shape(context: "Context", ref: "RefValue") -> tuple[int, ...] | None:
    """The shape of a Ref rounded up to whole tiles of the target chip; None where a Ref ends with
    its last element.
    """
    checked = context.kernel.checked
    if checked is None or not checked.padded_tiles or not ref.shape or ref.space == "smem":
        return None
    if not isinstance(ref.dtype, np.dtype) or ref.dtype.itemsize > WIDEST_ELEMENT:
        return None
    tile = _jax.tpu_info.infer_tiling(_jax.ShapedArray(ref.shape, ref.dtype))
    return tuple(-(-extent // part) * part for extent, part in zip(ref.shape, tile, strict=True))


def refused(context: "Context", view: "View", operation: str) -> NotImplementedError:
    """The error for a window that may reach into the padding where that is not supported."""
    return NotImplementedError(
        f"{context.describe()}: {operation} of {view.ref.name!r}, whose window may reach into the "
        "padding of its tiles, is not supported by checked mode with padded_tiles=True. Leave "
        "padded_tiles at False, or give the Ref the padded shape"
    )


def inside(function: FunctionBuilder, start: Index, size: Index, step: int, end: Index) -> Index:
    """How many of `size` elements from `start`, `step` apart, lie in front of the end."""
    if isinstance(start, int) and isinstance(size, int) and isinstance(end, int):
        return max(0, min(size, -((start - end) // step)))
    left = function.index(function.subtract(end, start))
    if step != 1:
        rounded = function.index(function.add(left, step - 1))
        left = function.builder.sdiv(rounded, ir.Constant(i64, step))
    most = function.intrinsic("llvm.smin", i64, [function.index(size), left])
    return function.intrinsic("llvm.smax", i64, [most, ir.Constant(i64, 0)])


def is_inside(function: FunctionBuilder, position: Index, end: Index) -> Index:
    """1 if a position lies in front of the end, else 0."""
    if isinstance(position, int) and isinstance(end, int):
        return int(position < end)
    builder = function.builder
    answer = builder.icmp_signed("<", function.index(position), function.index(end))
    return builder.zext(answer, i64)


def fill_byte(checked: "Checked") -> int:
    """What each byte of a value that comes from the padding holds."""
    if isinstance(checked.fill, int):
        return checked.fill
    if checked.fill == "random":
        # One byte for all: as arbitrary as any other content.
        return random.Random(checked.seed).randrange(256)
    return 0 if checked.fill == "zeros" else 0xFF


def fill(context: "Context", buffer: Buffer, byte: int) -> None:
    """Sets every byte of a dense buffer."""
    function = context.function
    size = buffer.size * dtypes.itemsize(buffer.dtype)
    callee = function.external("llvm.memset.p0.i64", void, [pointer, i8, i64, i1])
    arguments = [ir.Constant(i8, byte), ir.Constant(i64, size), ir.Constant(i1, 0)]
    function.builder.call(callee, [buffer.address, *arguments])


def read(context: "Context", view: "View") -> Value:
    """The contents of a view that may reach into the padding."""
    target = nests.dense_buffer(context, view.shape, np.dtype(view.dtype))
    fill(context, target, fill_byte(context.kernel.checked))

    def step(
        function: FunctionBuilder, address: ir.Value, held: list[Buffer], index: list[Index]
    ) -> None:
        register = load_element(function, address, target.dtype)
        store_element(function, register, held[0].element_address(function, index), target.dtype)

    for_each_inside(context, "read_inside", view, [target], step)
    if target.shape and not is_small(target.shape, target.dtype):
        return target
    return make_packed(target.shape, target.dtype, pack(context.function, target))


def write(context: "Context", view: "View", value: Value) -> None:
    """Stores what of a value does not lie in the padding."""
    reads_target = view.ref.memory in value.roots()
    source = context.copy(value) if reads_target else context.materialise(value)

    def step(
        function: FunctionBuilder, address: ir.Value, held: list[Buffer], index: list[Index]
    ) -> None:
        register = held[0].element(ElementBuilder(function), index)
        store_element(function, register, address, view.dtype)

    for_each_inside(context, "write_inside", view, [source], step)


def for_each_inside(
    context: "Context",
    name: str,
    view: "View",
    buffers: Sequence[Buffer],
    step: Callable[[FunctionBuilder, ir.Value, list[Buffer], list[Index]], None],
) -> None:
    """Runs `step(function, address, buffers, index)` for each element of a view that does not lie
    in the padding, in a function of its own.
    """
    extents, _ = view.reach()
    known = [extent for extent in extents if not isinstance(extent, int)]
    leaves = [leaf for buffer in buffers for leaf in buffer.leaves()]
    arguments = [view.address, *known, *leaves]
    inner = context.function.sibling(name, [argument.type for argument in arguments])
    base, *rest = inner.parameters
    incoming = iter(rest)
    bounds = [extent if isinstance(extent, int) else next(incoming) for extent in extents]
    held = [buffer.rebuild(incoming) for buffer in buffers]
    with context.inside(inner):
        with inner.nest(bounds) as [_, *index]:
            address = inner.advance(base, inner.linear_index(index, view.strides))
            step(inner, address, held, index)
        inner.finish()
    context.call(inner, arguments)


@record(frozen=True, eq=False)
class Window:
    """The elements of a Ref that a view shows, those in the padding too: of each of its dimensions
    the first and the one behind the last. `shape` is that of the Ref.
    """

    starts: tuple[Index, ...]
    stops: tuple[Index, ...]
    shape: tuple[int, ...]

    def map(self, function: Callable[[Index], Any]) -> "Window":
        """The window with something else in place of its numbers."""
        starts, stops = tuple(map(function, self.starts)), tuple(map(function, self.stops))
        return Window(starts, stops, self.shape)


def step(view: "View", dimension: int) -> int:
    """How far apart in the Ref the elements of one dimension of a view lie."""
    assert view.origin is not None
    return steps_along(view, view.origin.axes[dimension], view.strides[dimension])


def steps_along(view: "View", axis: int, stride: int) -> int:
    """How many elements of one dimension of the Ref so many bytes are."""
    return stride // (row_major(view.ref.shape)[axis] * view.ref.itemsize)


def overhang_of(function: FunctionBuilder, view: "View") -> "Overhang":
    """How much of a view lies in its Ref, by where it begins there."""
    from cokernel.compiler.refs import Overhang

    assert view.origin is not None
    shape, starts, axes = view.ref.shape, view.origin.starts, view.origin.axes
    lengths = tuple(
        inside(function, starts[axis], extent, step(view, dimension), shape[axis])
        for dimension, (axis, extent) in enumerate(zip(axes, view.extents, strict=True))
    )
    is_there: Index = 1
    for axis in sorted(set(range(len(shape))) - set(axes)):
        is_there = function.multiply(is_there, is_inside(function, starts[axis], shape[axis]))
    return Overhang(lengths, is_there)


def window_of(function: FunctionBuilder, view: "View") -> Window:
    """The window of a view that may reach into the padding."""
    assert view.origin is not None
    starts = view.origin.starts
    stops = [function.add(start, 1) for start in starts]
    for dimension, (axis, extent) in enumerate(zip(view.origin.axes, view.extents, strict=True)):
        span = function.multiply(function.subtract(extent, 1), step(view, dimension))
        stops[axis] = function.add(stops[axis], span)
    return Window(starts, tuple(stops), tuple(view.ref.shape))


def tell_if_read(context: "Context", view: "View", site: ir.Constant, read: int) -> None:
    """Tells the runtime that a value may come from the padding, if one of the view does."""
    window = window_of(context.function, view)
    tell_if_cut(context, view.reach()[0], (1, *view.extents), window, site, read)


def tell_if_cut(
    context: "Context",
    reach: Sequence[Index],
    extents: Sequence[Index],
    window: Window,
    site: ir.Constant,
    read: int,
) -> None:
    """The same of a block of these extents, of which so much lies in front of the padding."""
    from cokernel.compiler.probes import table

    function, builder = context.function, context.builder
    with builder.if_then(is_cut(context, reach, extents), likely=False):
        numbers = [*window.starts, *window.stops, *window.shape]
        arguments = [ir.Constant(i64, len(window.shape)), table(context, numbers)]
        function.call_external(
            "cokernel_checked_read_padding",
            void,
            [function.core, site, ir.Constant(i32, read), *arguments],
        )


def is_cut(context: "Context", reach: Sequence[Index], extents: Sequence[Index]) -> ir.Value:
    """Whether some of a block does not lie in front of the padding."""
    function, builder = context.function, context.builder
    answer: ir.Value = ir.Constant(i1, 0)
    for one, other in zip(reach, extents, strict=True):
        is_less = builder.icmp_signed("<", function.index(one), function.index(other))
        answer = builder.or_(answer, is_less)
    return answer
