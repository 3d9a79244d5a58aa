"""Checked mode's probes: compiled code tells the runtime which elements it is about to touch.

Everything here is emitted only for a kernel that is compiled with `checked`; see
`runtime/checked/checked_abi.h` for what the runtime does with it. A probe names a *site* (the line,
the Ref as the program calls it), the kind of access, and where the elements are.
"""

import contextlib
import enum
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import dtypes
from cokernel.compiler.dtypes import i8, i32, i64, pointer, void
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.records import record

if TYPE_CHECKING:
    from cokernel.compiler.context import Context
    from cokernel.compiler.refs import RefValue, View
    from cokernel.compiler.values import Value

# Addresses of so many pieces go to the runtime in one call; more are told one by one.
PIECES_AT_ONCE = 256


class Access(enum.Enum):
    """What a rule does to what it resolves."""

    READ = 0
    WRITE = 1
    # Reads and writes as one step that other atomic updates cannot come between.
    ATOMIC = 2
    # Reads and then writes.
    UPDATE = 3
    # An atomic update that programs wait and signal by, such as taking a ticket.
    SYNCHRONISING = 4
    # Reads a flag that another core will write; see `polling.py`.
    POLL = 5
    # Nothing yet: the rule emits probes of its own, for instance for the lanes in a mask.
    NONE = -1


@record(frozen=True)
class Answer:
    """What the runtime has said when it was told of a read."""

    # The Ref and the indices, as the equation has them.
    atoms: Sequence[Any]
    view: "View"
    # Zero if everything there is defined.
    register: ir.Value


def is_probed(context: "Context") -> bool:
    """Whether accesses to memory are followed. A rule asks before it emits a probe."""
    checked = context.kernel.checked
    if checked is None or not (checked.races or checked.uninitialised):
        return False
    context.probe_count += 1
    return True


def access_site(context: "Context", view: "View", operation: str) -> ir.Constant:
    """The site of an access."""
    shape = str(tuple(view.ref.shape))
    return context.site(operation, view.ref.name, shape=shape, rank=len(view.extents))


def probe(context: "Context", view: "View", access: Access, operation: str) -> ir.Value | None:
    """Tells the runtime of an access to everything that a view shows. Returns the runtime's answer,
    not zero where something there may have been undefined before; None if it was not asked so.
    """
    if access is Access.NONE or dtypes.is_semaphore(view.dtype) or not is_probed(context):
        return None
    with telling(context, view, access):
        return _probe_view(context, view, access, operation)


def _probe_view(
    context: "Context", view: "View", access: Access, operation: str
) -> ir.Value | None:
    from cokernel.compiler.refs import Place

    if view.pieces is not None:
        from cokernel.compiler.pieces import piece

        with one_access(context):
            for number in range(dtypes.itemsize(view.dtype) // dtypes.itemsize(view.pieces.dtype)):
                probe(context, piece(context, view, number), access, operation)
        return None
    is_reached = context.kernel.cores_write_to_others or view.ref.place is not Place.PRIVATE
    if access is Access.READ and context.is_polled and is_reached:
        access = Access.POLL
    site = access_site(context, view, operation)
    if view.indices is not None:
        _probe_picked(context, view, access, site)
        return None
    itemsize = dtypes.itemsize(view.dtype)
    extents, strides = view.reach()
    if context.claims is None:
        return probe_block(context, site, access, view.address, extents, strides, itemsize)
    if any(isinstance(extent, int) and extent == 0 for extent in extents):
        return None
    few, steps = merged(context.function, extents, strides)
    return context.claims.guarded(
        context,
        view,
        access,
        site,
        (few, steps),
        lambda: probe_block(context, site, access, view.address, few, steps, itemsize),
    )


@contextlib.contextmanager
def one_access(context: "Context", *, is_scatter: bool = False) -> Iterator[None]:
    """Has the runtime count what is probed within as one access. `is_scatter`: it is a copy to
    places that indices pick, of which each may come once.
    """
    function = context.function
    claims = context.claims
    for begins in (2 if is_scatter else 1, 0):
        arguments = [function.core, ir.Constant(i32, begins)]
        function.call_external("cokernel_checked_group", void, arguments)
        if begins:
            with contextlib.nullcontext() if claims is None else claims.grouped():
                yield


# Blocks.


def probe_block(
    context: "Context",
    site: ir.Constant,
    access: Access,
    address: ir.Value,
    extents: Sequence[Index],
    strides: Sequence[int],
    itemsize: int,
) -> ir.Value | None:
    """Tells of an access to a strided block, and returns the runtime's answer. Strides are in
    bytes.
    """
    if any(isinstance(extent, int) and extent == 0 for extent in extents):
        return None
    extents, strides = merged(context.function, extents, strides)
    if not extents:
        return probe_run(context, site, access, address, itemsize, itemsize)
    if len(extents) == 1 and strides[0] == itemsize:
        size = context.function.multiply(extents[0], itemsize)
        return probe_run(context, site, access, address, size, itemsize)
    function = context.function
    return _noted(
        context,
        function.call_external(
            "cokernel_checked_access_strided",
            i32,
            [
                *_head(function, site, access),
                address,
                ir.Constant(i64, itemsize),
                ir.Constant(i64, len(extents)),
                table(context, extents),
                table(context, strides),
            ],
        ),
    )


def probe_run(
    context: "Context",
    site: ir.Constant,
    access: Access,
    address: ir.Value,
    size: Index,
    itemsize: int,
) -> ir.Value:
    """Tells of an access to `size` bytes that lie together, and returns the runtime's answer."""
    function = context.function
    arguments = [address, function.index(size), ir.Constant(i64, itemsize)]
    return _noted(
        context,
        function.call_external(
            "cokernel_checked_access", i32, [*_head(function, site, access), *arguments]
        ),
    )


def _noted(context: "Context", probe: ir.Value) -> ir.Value:
    """A probe that has been emitted, once the loop around it knows of it."""
    if context.claims is not None:
        context.claims.note(probe)
    return probe


def telling(
    context: "Context", view: "View", access: Access
) -> contextlib.AbstractContextManager[None]:
    """Around probes of what a view shows a part of."""
    if context.claims is None:
        return contextlib.nullcontext()
    return context.claims.telling(view, access)


def _head(function: FunctionBuilder, site: ir.Constant, access: Access) -> list[ir.Value]:
    return [function.core, site, ir.Constant(i32, access.value)]


def merged(
    function: FunctionBuilder, extents: Sequence[Index], strides: Sequence[int]
) -> tuple[list[Index], list[int]]:
    """The same block with as few dimensions as possible."""
    few: list[Index] = []
    steps: list[int] = []
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        if isinstance(extent, int) and extent == 1:
            continue
        inner = few[-1] if few else None
        if isinstance(inner, int) and stride == inner * steps[-1]:
            few[-1] = function.multiply(extent, inner)
        else:
            few.append(extent)
            steps.append(stride)
    return few[::-1], steps[::-1]


def table(context: "Context", values: Sequence[Index]) -> ir.Value:
    """The numbers in memory, one i64 after the other."""
    function = context.function
    if all(isinstance(value, int) for value in values):
        numbers = function.constant_data(i64, [int(value) for value in values])
        # llvmlite gives it a typed pointer, which LLVM no longer has.
        numbers.type = pointer
        return numbers
    room = scratch(context, 8 * len(values))
    for number, value in enumerate(values):
        function.builder.store(function.index(value), function.advance(room, 8 * number))
    return room


def scratch(context: "Context", size: int) -> ir.Value:
    """A little memory for the arguments of one call. It may be used again right after it."""
    function = context.function
    if function.can_suspend:
        # On the stack it would become part of the coroutine's frame.
        return context.private_address(context.program.arena.allocate(size).offset)
    kind = ir.ArrayType(i8, size)
    room = function.entry_builder.alloca(kind)
    room.align = 64
    # llvmlite gives it a typed pointer, which LLVM no longer has.
    room.type = pointer
    return room


# Elements that index arrays or lanes pick.


def _probe_picked(context: "Context", view: "View", access: Access, site: ir.Constant) -> None:
    from cokernel.compiler.access import in_memory, picked_spot

    indices = view.indices
    assert indices is not None
    itemsize = dtypes.itemsize(view.dtype)
    rank = len(view.shape)
    if 0 in view.shape:
        return
    # What lies together at the end of the view is told as one piece.
    after = view.extents[indices.position :]
    run = itemsize
    outer = rank
    for extent, stride in zip(
        reversed(after), reversed(view.strides[indices.position :]), strict=True
    ):
        if extent != 1 and stride != run:
            break
        run *= int(extent)
        outer -= 1
    shape = view.shape[:outer]
    arrays = [in_memory(context, array) for array in indices.arrays]
    operands: list[Value] = [view.strided_part(), *arrays]
    leaves = [leaf for operand in operands for leaf in operand.leaves()]
    inner = context.function.sibling("probe_picked", [leaf.type for leaf in leaves])
    incoming = iter(inner.parameters)
    base, *picks = (operand.rebuild(incoming) for operand in operands)
    pieces = math.prod(shape)
    with context.inside(inner):
        at_once = pieces <= PIECES_AT_ONCE
        room = scratch(context, 8 * pieces) if at_once else None
        strides: list[Index] = []
        step = 1
        for extent in reversed(shape):
            strides.insert(0, step)
            step *= extent
        grouped = contextlib.nullcontext() if at_once else one_access(context)
        with grouped, inner.nest(shape) as index:
            place = [*index, *[0] * (rank - outer)]
            address = picked_spot(
                context, ElementBuilder(inner), indices, base, picks, place
            ).address
            if room is None:
                probe_run(context, site, access, address, run, itemsize)
            else:
                number = inner.multiply(inner.linear_index(index, strides), 8)
                inner.builder.store(address, inner.advance(room, number))
        if room is not None:
            _tell_pieces(context, site, access, room, pieces, run, itemsize, None)
        inner.finish()
    context.call(inner, leaves)


def _tell_pieces(
    context: "Context",
    site: ir.Constant,
    access: Access,
    addresses: ir.Value,
    count: int,
    size: int,
    itemsize: int,
    mask: ir.Value | None,
) -> None:
    function = context.function
    probe = function.call_external(
        "cokernel_checked_access_picked",
        void,
        [
            *_head(function, site, access),
            addresses,
            ir.Constant(i64, count),
            ir.Constant(i64, size),
            ir.Constant(i64, itemsize),
            ir.Constant(pointer, None) if mask is None else mask,
        ],
    )
    _noted(context, probe)


def lane_addresses(context: "Context", base: ir.Value, offsets: Sequence[int]) -> ir.Value:
    """A vector of the addresses so many bytes behind a base; one pointer for one offset."""
    count = len(offsets)
    if count == 1:
        return context.function.advance(base, offsets[0])
    constants = ir.Constant(ir.VectorType(i64, count), list(offsets))
    return vector_gep(context, base, constants)


def vector_gep(context: "Context", base: ir.Value, offsets: ir.Value) -> ir.Value:
    """The addresses that lie a vector of numbers of bytes behind a base."""
    gep = ir.instructions.GEPInstr(
        context.builder.block, base, [offsets], False, "lanes", source_etype=i8
    )
    # llvmlite does not know that a vector of indices gives a vector of pointers.
    is_vector = isinstance(offsets.type, ir.VectorType)
    gep.type = ir.VectorType(pointer, offsets.type.count) if is_vector else pointer
    context.builder._insert(gep)
    return gep


def probe_lanes(
    context: "Context",
    view: "View",
    access: Access,
    operation: str,
    addresses: ir.Value,
    mask: ir.Value | None,
) -> None:
    """Tells of an access to the elements at a vector of addresses, in the lanes of a mask."""
    if not is_probed(context):
        return
    builder = context.builder
    count = addresses.type.count if isinstance(addresses.type, ir.VectorType) else 1
    room = scratch(context, 9 * count)
    builder.store(addresses, room, align=8)
    taken = None
    if mask is not None:
        wide = ir.VectorType(i8, count) if isinstance(mask.type, ir.VectorType) else i8
        taken = context.function.advance(room, 8 * count)
        builder.store(builder.zext(mask, wide), taken, align=1)
    site = access_site(context, view, operation)
    itemsize = dtypes.itemsize(view.dtype)
    with telling(context, view, access):
        _tell_pieces(context, site, access, room, count, itemsize, itemsize, taken)


def probe_masked(
    context: "Context", view: "View", mask: "Value", access: Access, operation: str
) -> None:
    """Tells of an access to those elements of a view that a mask of its shape selects."""
    from cokernel.compiler.access import in_memory, picked_spot
    from cokernel.compiler.spots import Spots
    from cokernel.compiler.values import Buffer, is_small

    if not is_probed(context) or 0 in view.shape:
        return
    itemsize = dtypes.itemsize(view.dtype)
    indices = view.indices
    is_few = is_small(view.shape, np.int64) and is_small(mask.shape, mask.dtype)
    if indices is None and not view.hangs and is_few:
        offsets = [
            sum(i * stride for i, stride in zip(index, view.strides, strict=True))
            for index in np.ndindex(*view.shape)
        ]
        addresses = lane_addresses(context, view.address, offsets)
        return probe_lanes(context, view, access, operation, addresses, context.pack(mask))
    site = access_site(context, view, operation)
    arrays = [] if indices is None else [in_memory(context, array) for array in indices.arrays]
    spots = Spots(context, view) if indices is None else None
    starts = [] if spots is None else spots.operands
    operands: list[Value] = [view.strided_part(), context.materialise(mask), *starts, *arrays]
    leaves = [leaf for operand in operands for leaf in operand.leaves()]
    inner = context.function.sibling("probe_masked", [leaf.type for leaf in leaves])
    incoming = iter(inner.parameters)
    base, taken, *rest = (operand.rebuild(incoming) for operand in operands)
    origin, picks = rest[: len(starts)], rest[len(starts) :]
    with context.inside(inner), telling(context, view, access):
        with inner.nest(view.shape) as index:
            builder = ElementBuilder(inner)
            with inner.builder.if_then(taken.element(builder, index)):
                if spots is not None:
                    assert isinstance(base, Buffer)
                    address = base.element_address(inner, index)
                    spot = spots.at(inner, origin, address, index)
                else:
                    assert indices is not None
                    spot = picked_spot(context, builder, indices, base, picks, index)
                probe_run(context, site, access, spot.address, itemsize, itemsize)
        inner.finish()
    context.call(inner, leaves)


def probe_front(
    context: "Context", view: "View", count: ir.Value, access: Access, operation: str
) -> None:
    """Tells of an access to the first `count` elements of a view, in row-major order."""
    from cokernel.compiler.spots import Spots

    if not is_probed(context) or 0 in view.shape:
        return
    site = access_site(context, view, operation)
    itemsize = dtypes.itemsize(view.dtype)
    buffer = view.buffer()
    if buffer.is_dense and not view.hangs:
        size = context.function.multiply(count, itemsize)
        with telling(context, view, access):
            probe_run(context, site, access, buffer.address, size, itemsize)
        return
    spots = Spots(context, view)
    leaves = [leaf for operand in spots.operands for leaf in operand.leaves()]
    inner = context.function.sibling("probe_front", [pointer, i64, *[leaf.type for leaf in leaves]])
    base, limit, *rest = inner.parameters
    incoming = iter(rest)
    origin = [operand.rebuild(incoming) for operand in spots.operands]
    with context.inside(inner), telling(context, view, access):
        with inner.loop(0, limit) as loop:
            index = inner.unravel(loop.counter, view.shape)
            address = inner.advance(base, inner.linear_index(index, view.strides))
            spot = spots.at(inner, origin, address, index)
            probe_run(context, site, access, spot.address, itemsize, itemsize)
        inner.finish()
    context.call(inner, [buffer.address, count, *leaves])


def probe_whole(context: "Context", ref: "RefValue", access: Access, operation: str) -> None:
    """Tells of an access to all of a Ref that lies in this core's reach."""
    if not is_probed(context):
        return
    shape = str(tuple(ref.shape))
    site = context.site(operation, ref.name, shape=shape, rank=len(ref.shape))
    probe_run(context, site, access, ref.address(context), ref.nbytes, ref.itemsize)


# Memory that comes and goes.


def allocated(
    context: "Context", ref: "RefValue", operation: str, *, starts_at_zero: bool = True
) -> None:
    """Tells that a Ref's memory begins to be what the program has just asked for.

    `starts_at_zero` matters for semaphores only: whether what was signalled before is forgotten.
    """
    if context.kernel.checked is None:
        return
    function = context.function
    function.call_external(
        "cokernel_checked_allocate",
        void,
        [
            function.core,
            _scope_site(context, ref, operation),
            ref.address(context),
            ir.Constant(i64, ref.nbytes),
            ir.Constant(i64, ref.itemsize),
            ir.Constant(i32, _semaphore_kind(ref, starts_at_zero)),
        ],
    )


def released(
    context: "Context", ref: "RefValue", operation: str, *, starts_at_zero: bool = True
) -> None:
    """Tells that the scope of a Ref has ended."""
    if context.kernel.checked is None:
        return
    function = context.function
    function.call_external(
        "cokernel_checked_release",
        void,
        [
            function.core,
            _scope_site(context, ref, operation),
            ref.address(context),
            ir.Constant(i64, ref.nbytes),
            ir.Constant(i32, _semaphore_kind(ref, starts_at_zero)),
        ],
    )


def _scope_site(context: "Context", ref: "RefValue", operation: str) -> ir.Constant:
    shape = tuple(ref.shape)
    return context.site(operation, ref.name, shape=str(shape), rank=len(shape), is_scope=True)


def _semaphore_kind(ref: "RefValue", starts_at_zero: bool) -> int:
    if not dtypes.is_semaphore(ref.dtype):
        return 0
    return 1 if starts_at_zero else 2


# Synchronisation.


def step(context: "Context", site: ir.Constant, about: ir.Value | None = None) -> None:
    """Lets others go first: what follows may be seen by them, so its place in the order matters.
    `about` is the address of what they see, None if it is the core's own affair.
    """
    function = context.function
    touched = ir.Constant(pointer, None) if about is None else about
    function.suspend_unless(
        lambda: function.call_external("cokernel_checked_step", i32, [function.core, site, touched])
    )
