"""What a pipeline does not fetch of a window, for checked mode: it is undefined from then on.

The last block of a grid may hang over the end of an array, so that it fills its window only in
part. What is left in the rest of the window, from the block that was there before, is no data.
"""

import dataclasses
from typing import Any

from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i1, i64, void
from cokernel.compiler.ops import copies
from cokernel.compiler.ops.definedness import is_followed
from cokernel.compiler.probes import Access, merged, table
from cokernel.compiler.refs import Place, RefValue, View, root_of
from cokernel.compiler.transforms import resolve
from cokernel.compiler.window_names import name_is_words


def forget_rest(
    context: Context,
    to: tuple[RefValue, tuple[Any, ...]],
    block: copies.Block,
    semaphore: Any,
    operation: str,
) -> None:
    """Makes a window undefined that a pipeline is about to fetch a part of; the copy makes that
    part defined again.

    Args:
      to: the target of the copy, and what selects a part of it.
      block: what is copied.
      semaphore: what the copy signals.
    """
    root, transforms = to
    is_window = root.place is Place.PRIVATE and name_is_words(root.name)
    if not is_followed(context) or not is_window:
        return
    slot = _whole_slot(root, transforms, semaphore)
    if slot is None:
        return
    whole = resolve(context, root, slot, operation, access=Access.NONE, is_dma=True)
    is_part = _is_part(context, block, whole)
    if is_part is None:
        return
    function = context.function
    extents, strides = merged(function, whole.extents, whole.strides)
    with context.builder.if_then(is_part, likely=False):
        function.call_external(
            "cokernel_checked_forget",
            void,
            [
                function.core,
                whole.address,
                ir.Constant(i64, dtypes.itemsize(whole.dtype)),
                ir.Constant(i64, len(extents)),
                table(context, extents),
                table(context, strides),
            ],
        )


def _is_part(context: Context, block: copies.Block, whole: View) -> ir.Value | None:
    """Whether a copy leaves something of the window out; None if it never does."""
    extents = block.target.extents
    if len(extents) != len(whole.extents) or block.target.picks:
        return None
    function, builder = context.function, context.builder
    answer: ir.Value = ir.Constant(i1, 0)
    is_known = True
    for one, other in zip(extents, whole.extents, strict=True):
        if isinstance(one, int) and isinstance(other, int) and one == other:
            continue
        is_known = False
        is_less = builder.icmp_signed("<", function.index(one), function.index(other))
        answer = builder.or_(answer, is_less)
    return None if is_known else answer


def _whole_slot(
    root: RefValue, transforms: tuple[Any, ...], semaphore: Any
) -> tuple[Any, ...] | None:
    """The transforms for the slot that a part is selected of; None if that is not what they do."""
    if not transforms or not all(isinstance(one, _jax.NDIndexer) for one in transforms):
        return None
    *before, last = transforms
    slices = [index for index in last.indices if isinstance(index, _jax.Slice)]
    if any(not isinstance(index, _jax.Slice) and _is_array(index) for index in last.indices):
        return None
    if len(root.shape) == 1 and not before and semaphore is not None:
        # Slots of one dimension lie one behind the other in one Ref, and each has a semaphore.
        semaphores, selected = root_of(semaphore)
        if len(semaphores.shape) != 1 or len(selected) != 1 or not slices:
            return None
        size = root.shape[0] // semaphores.shape[0]
        return (dataclasses.replace(last, indices=(_jax.Slice(slices[0].start, size, 1),)),)
    if any(not _is_zero(index.start) or index.stride != 1 for index in slices):
        return None
    whole = tuple(
        _jax.Slice(0, extent, 1) if isinstance(index, _jax.Slice) else index
        for index, extent in zip(last.indices, last.shape, strict=True)
    )
    return (*before, dataclasses.replace(last, indices=whole))


def _is_array(index: Any) -> bool:
    return not isinstance(index, int) and bool(getattr(index, "shape", ()))


def _is_zero(start: Any) -> bool:
    return isinstance(start, int) and start == 0
