"""Semaphores, barriers, delays and sums in another core's memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.analysis import before_polled_store_p
from cokernel.compiler.context import Context
from cokernel.compiler.definedness import AMOUNT
from cokernel.compiler.dtypes import i32, i64, void
from cokernel.compiler.function import Index
from cokernel.compiler.ops.control import yield_core
from cokernel.compiler.ops.definedness import require_defined
from cokernel.compiler.ops.registry import added_rule, rule
from cokernel.compiler.ops.targets import Target, find_target, require, static_position
from cokernel.compiler.probes import Access, step
from cokernel.compiler.refs import AnyRef, Place, RefValue, View, root_of
from cokernel.compiler.transforms import resolve
from cokernel.compiler.values import Scalar, Value, row_major
from cokernel.compiler.window_names import element_name
from cokernel.records import record


def written_name(ref: RefValue, transforms: Sequence[Any]) -> str:
    """The Ref as the user wrote it, with its indices if they are known: "sems[2]", "sems[...]"."""
    parts = ""
    for transform in transforms:
        if isinstance(transform, _jax.NDIndexer) and transform.indices:
            indices = [_written_index(index) for index in transform.indices]
            parts += "[...]" if "..." in indices else f"[{', '.join(indices)}]"
    return element_name(ref.name, parts)


def _written_index(index: Any) -> str:
    if isinstance(index, _jax.Slice):
        start, size = _constant(index.start), _constant(index.size)
        if start is None or size is None:
            return "..."
        stop = start + size * index.stride
        return f"{start}:{stop}" if index.stride == 1 else f"{start}:{stop}:{index.stride}"
    constant = _constant(index)
    return "..." if constant is None else str(constant)


@record(frozen=True)
class SemaphoreAt:
    """One semaphore of one core: where it is, and how reports call it."""

    address: ir.Value
    name: str
    # By which reports find who else touches the same semaphore; see `semaphore_key`.
    key: tuple[Any, ...]


def semaphore_at(
    context: Context,
    ref: Any,
    operation: str,
    *,
    transforms: Sequence[Any] = (),
    device_id: Any = None,
    device_id_type: Any = None,
    core_index: Value | None = None,
) -> SemaphoreAt:
    """The semaphore that a Ref and its transforms select, on the core that `device_id` names or on
    this one.
    """
    root, inner = root_of(ref)
    root = context.kernel.layout.barrier_semaphore_of(context.program.index, root, device_id)
    transforms = (*inner, *transforms)
    name = written_name(root, transforms)
    target = find_target(
        context,
        root,
        operation,
        name,
        device_id=device_id,
        device_id_type=device_id_type,
        core_index=core_index,
    )
    base = target.address(context)
    view = resolve(context, root, transforms, operation, access=Access.NONE, at=base)
    if any(extent != 1 for extent in view.extents):
        raise ValueError(
            f"{context.describe()}: {operation} needs one semaphore, but {name!r} has the shape "
            f"{tuple(view.extents)}"
        )
    return SemaphoreAt(view.address, name, semaphore_key(target, _static_offset(root, transforms)))


def _static_offset(root: RefValue, transforms: Sequence[Any]) -> int | None:
    """Where the selected semaphore lies in its Ref, in bytes; None if it is chosen at run time."""
    strides = [stride * root.itemsize for stride in row_major(root.shape)]
    offset = 0
    for transform in transforms:
        if not isinstance(transform, _jax.NDIndexer):
            return None
        kept = []
        for index, stride in zip(transform.indices, strides, strict=True):
            start = _constant(index.start if isinstance(index, _jax.Slice) else index)
            if start is None:
                return None
            offset += start * stride
            if isinstance(index, _jax.Slice):
                kept.append(stride * index.stride)
        strides = kept
    return offset


def _constant(index: Any) -> int | None:
    """An index that is known at compile time."""
    if isinstance(index, Scalar) and isinstance(index.register, ir.Constant):
        index = index.register.constant
    return int(index) if isinstance(index, int | np.integer) else None


def semaphore_key(target: Target, offset: int | None) -> tuple[Any, ...]:
    """What identifies a semaphore in reports, as plain data: (place, program or operand, first
    byte, end, core).

    Bytes count from the start of the owner's block for a private semaphore, and from the start of
    one instance for an operand. `core` is the row-major number of the owner, "own" for the core
    that acts, or None if it is chosen at run time.
    """
    ref = target.ref
    first = ref.offset if ref.place is Place.PRIVATE else 0
    owner = ref.program if ref.place is Place.PRIVATE else ref.offset
    if offset is None:
        span = (first, first + ref.nbytes)
    else:
        span = (first + offset, first + offset + ref.itemsize)
    core: Any = "own" if target.is_own else static_position(target)
    return (ref.place.value, owner, *span, core)


def signal(context: Context, semaphore: SemaphoreAt, amount: Index, site: ir.Constant) -> None:
    """Adds to a semaphore."""
    function = context.function
    if context.is_checked:
        step(context, site, semaphore.address)
    function.call_external(
        "cokernel_checked_signal" if context.is_checked else "cokernel_semaphore_signal",
        void,
        [function.core, semaphore.address, function.index(amount), site],
    )


def wait(
    context: Context,
    semaphore: SemaphoreAt,
    amount: Index,
    decrement: bool,
    site: ir.Constant,
    *,
    is_dma: bool = False,
) -> None:
    """Blocks until a semaphore has counted to `amount`, and takes that from it if `decrement`.
    `is_dma` says that the amount is the bytes of a copy.
    """
    function = context.function
    arguments = [
        function.core,
        semaphore.address,
        function.index(amount),
        ir.Constant(i32, int(decrement)),
        site,
    ]
    name = "cokernel_semaphore_wait"
    if context.is_checked:
        name = "cokernel_checked_wait"
        arguments.insert(-1, ir.Constant(i32, int(is_dma)))
    function.suspend_unless(lambda: function.call_external(name, i32, arguments))


def _unflatten(eqn: Any, operands: Sequence[Any]) -> Any:
    return eqn.params["args_tree"].unflatten(operands)


def _require_not_negative(
    context: Context, amount: Index, operation: str, name: str, what: str
) -> None:
    function = context.function
    if isinstance(amount, int):
        if amount >= 0:
            return
        good: ir.Value = ir.Constant(dtypes.i1, 0)
    else:
        good = function.builder.icmp_signed(">=", amount, ir.Constant(i64, 0))
    require(
        context, good, operation, name, f"{what} must not be negative, but is {{value}}", amount
    )


@rule(_jax.pallas_primitives.semaphore_signal_p)
def _semaphore_signal(context: Context, eqn: Any, *operands: Any) -> None:
    ref, transforms, increment, device_id, core_index = _unflatten(eqn, operands)
    semaphore = semaphore_at(
        context,
        ref,
        "semaphore_signal",
        transforms=transforms,
        device_id=device_id,
        device_id_type=eqn.params["device_id_type"],
        core_index=core_index,
    )
    amount = context.index(increment)
    site = context.site("semaphore_signal", semaphore.name, signals=(semaphore.key,))
    if context.is_checked:
        _signal_below_zero(context, semaphore, amount, site)
    _require_not_negative(context, amount, "semaphore_signal", semaphore.name, "the increment")
    signal(context, semaphore, amount, site)


def _signal_below_zero(
    context: Context, semaphore: SemaphoreAt, amount: Index, site: ir.Constant
) -> None:
    """Tells the runtime of a negative signal, which ends the launch where too little is counted."""
    if isinstance(amount, int):
        if amount < 0:
            signal(context, semaphore, amount, site)
        return
    builder = context.builder
    with builder.if_then(builder.icmp_signed("<", amount, ir.Constant(i64, 0)), likely=False):
        signal(context, semaphore, amount, site)


@rule(_jax.pallas_primitives.semaphore_wait_p)
def _semaphore_wait(context: Context, eqn: Any, *operands: Any) -> None:
    ref, transforms, value, decrement = _unflatten(eqn, operands)
    semaphore = semaphore_at(context, ref, "semaphore_wait", transforms=transforms)
    amount = context.index(value)
    _require_not_negative(
        context, amount, "semaphore_wait", semaphore.name, "the value to wait for"
    )
    site = context.site("semaphore_wait", semaphore.name, waits=semaphore.key)
    wait(context, semaphore, amount, bool(context.index(decrement)), site)


@rule(_jax.pallas_primitives.semaphore_read_p)
def _semaphore_read(context: Context, eqn: Any, *operands: Any) -> Value:
    ref, transforms = _unflatten(eqn, operands)
    semaphore = semaphore_at(context, ref, "semaphore_read", transforms=transforms)
    # Who reads a semaphore is likely to read it again until it changes, so the others get their
    # turn first.
    yield_core(context, "semaphore_read", semaphore.name, semaphore.address)
    function = context.function
    arguments = [function.core, semaphore.address]
    name = "cokernel_semaphore_read"
    if context.is_checked:
        name = "cokernel_checked_read"
        arguments.append(context.site("semaphore_read", semaphore.name))
    count = function.call_external(name, i32, arguments)
    return Scalar((), np.dtype(np.int32), count)


@rule(_jax.sc_primitives.barrier_p)
def _subcore_barrier(context: Context, eqn: Any) -> None:
    mesh = context.program.mesh
    if isinstance(mesh, _jax.ScalarSubcoreMesh | _jax.TensorCoreMesh):
        raise ValueError(
            f"{context.describe()}: subcore_barrier joins the vector subcores of a SparseCore, but "
            "this program runs on "
            f"{mesh}; use a semaphore instead"
        )
    function = context.function
    site = context.site("subcore_barrier", "barrier")
    name = "cokernel_checked_barrier" if context.is_checked else "cokernel_barrier_wait"
    function.suspend_unless(lambda: function.call_external(name, i32, [function.core, site]))


@rule(_jax.tpu_primitives.get_barrier_semaphore_p)
def _get_barrier_semaphore(context: Context, eqn: Any) -> RefValue:
    [result] = eqn.outvars
    layout, program = context.kernel.layout, context.program.index
    return layout.barrier_semaphore(program, eqn.params["tag"], result.aval)


@rule(_jax.pallas_primitives.delay_p)
def _delay(context: Context, eqn: Any, nanoseconds: Value) -> None:
    function = context.function
    amount = function.index(context.index(nanoseconds))
    function.call_external("cokernel_delay", void, [function.core, amount])


@rule(_jax.sc_primitives.fetch_and_add_p)
def _fetch_and_add(
    context: Context, eqn: Any, ref: RefValue, value: Value, *operands: Any
) -> Value:
    *indices, subcore = operands
    operation = "fetch_and_add"
    mesh = ref.mesh
    if ref.place is not Place.PRIVATE or mesh is None:
        raise ValueError(
            f"{context.describe()}: {operation} needs a Ref in a core's own SMEM, not {ref.name!r}"
        )
    axis = list(mesh.shape)[-1]
    target = find_target(context, ref, operation, ref.name, device_id={axis: subcore})
    indexer = _jax.NDIndexer(tuple(indices), ref.shape, ())
    address = target.address(context)
    if context.is_checked:
        step(context, context.site(operation, ref.name), address)
    view: View = resolve(
        context, ref, (indexer,), operation, access=Access.SYNCHRONISING, at=address
    )
    require_defined(context, view, operation, AMOUNT)
    amount = context.scalar(value)
    old = context.builder.atomic_rmw("add", view.address, amount, "acq_rel")
    return Scalar((), np.dtype(np.int32), old)


@added_rule(before_polled_store_p)
def _before_polled_store(context: Context, eqn: Any, ref: AnyRef) -> None:
    root, _ = root_of(ref)
    step(context, context.site(eqn.params["operation"], root.name), root.address(context))
