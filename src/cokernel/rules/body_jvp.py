"""Forward mode inside programs: the primitives of Pallas for which JAX has no rule.

Each float Ref has a Ref of tangents beside it. What moves data moves the tangents too, over the
same semaphores: a copy of floats is two copies, and to wait for it is to wait twice. Integers and
semaphores have no tangents.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cokernel import _jax

_Zero = _jax.ad.Zero


def is_differentiable(aval: Any) -> bool:
    """Returns whether values, or the elements of Refs, of this type carry tangents."""
    inner = aval.inner_aval if isinstance(aval, _jax.AbstractRef) else aval
    return isinstance(inner, _jax.ShapedArray) and jnp.issubdtype(inner.dtype, np.inexact)


def is_bitwise_access(eqn: Any) -> bool:
    """Returns whether an equation reads or writes a float Ref through a view of another type.

    JAX would take the bits of the tangents for the tangents of the bits.
    """
    tree = eqn.params.get("tree")
    if tree is None or not eqn.invars:
        return False
    aval = eqn.invars[0].aval
    if not isinstance(aval, _jax.AbstractRef) or not is_differentiable(aval):
        return False
    # Only what kinds of views there are matters, not their indices.
    views = jax.tree.unflatten(tree, [None] * tree.num_leaves)
    return any(
        isinstance(view, _jax.BitcastTransform)
        for view in jax.tree.leaves(views, is_leaf=lambda x: isinstance(x, _jax.BitcastTransform))
    )


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, _Zero)


def _zero_of(value: Any) -> Any:
    return _jax.ad.p2tz(value)


def jvp_of_jaxpr(
    jaxpr: Any, nonzero: Sequence[bool], instantiate: Sequence[bool]
) -> tuple[Any, list[bool]]:
    """Returns a jaxpr of primals and then tangents, and which of its outputs have tangents.

    Args:
      jaxpr: without constants.
      nonzero: which of its inputs carry a tangent.
      instantiate: which of its outputs must have one, be it zero.
    """
    new, nonzero_out = _jax.ad.jvp_jaxpr(jaxpr, list(nonzero), list(instantiate))
    if new.consts:
        shapes = ", ".join(jax.typeof(const).str_short() for const in new.consts)
        raise NotImplementedError(
            f"the derivative of program {jaxpr.debug_info.func_src_info} needs constants that are "
            f"arrays, which a program cannot hold: {shapes}"
        )
    return new, nonzero_out


def select[T](values: Sequence[T], flags: Sequence[bool]) -> list[T]:
    """Returns the values whose flags are set."""
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def _spread(values: Sequence[Any], flags: Sequence[bool], others: Sequence[Any]) -> list[Any]:
    """Returns zeros for `others`, but where the flag is set, the next of `values`."""
    remaining = iter(values)
    return [
        next(remaining) if flag else _zero_of(other)
        for other, flag in zip(others, flags, strict=True)
    ]


def _run_scoped_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jaxpr: Any,
    collective_axes: Any,
    ref_transforms: Any,
) -> tuple[list[Any], list[Any]]:
    """Allocates a Ref of tangents beside each float Ref that the scope allocates."""
    captured = [not _is_zero(t) for t in tangents]
    allocated = [is_differentiable(var.aval) for var in jaxpr.invars]
    num_captured, num_allocated = len(captured), len(allocated)
    open_jaxpr = jaxpr.with_consts(())
    new, nonzero_out = jvp_of_jaxpr(open_jaxpr, captured + allocated, [False] * len(jaxpr.outvars))
    variables = new.invars
    primal_vars = variables[: num_captured + num_allocated]
    tangent_vars = variables[num_captured + num_allocated :]
    num_captured_tangents = sum(captured)
    consts = [*primals, *select(tangents, captured)]
    new = new.replace(
        invars=[
            *primal_vars[:num_captured],
            *tangent_vars[:num_captured_tangents],
            *primal_vars[num_captured:],
            *tangent_vars[num_captured_tangents:],
        ],
    ).with_consts(consts)
    outs = _jax.pallas_primitives.run_scoped_p.bind(
        *consts,
        jaxpr=new,
        collective_axes=collective_axes,
        ref_transforms=(*ref_transforms, *select(ref_transforms, allocated)),
    )
    primal_outs = outs[: len(jaxpr.outvars)]
    return primal_outs, _spread(outs[len(jaxpr.outvars) :], nonzero_out, primal_outs)


def _parallel_loop_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, tree: Any, unroll: Any, jaxpr: Any
) -> tuple[list[Any], list[Any]]:
    """Carries a tangent beside each float that the loop carries."""
    lower, upper, step, consts, carries = jax.tree.unflatten(tree, primals)
    *_, const_tangents, carry_tangents = jax.tree.unflatten(tree, tangents)
    nonzero_consts = [not _is_zero(t) for t in const_tangents]
    nonzero_carries = [is_differentiable(jax.typeof(carry)) for carry in carries]
    new, _ = jvp_of_jaxpr(
        jaxpr.with_consts(()), [*nonzero_consts, False, *nonzero_carries], nonzero_carries
    )
    num_consts, num_primals = len(consts), len(consts) + 1 + len(carries)
    primal_vars, tangent_vars = new.invars[:num_primals], new.invars[num_primals:]
    num_const_tangents = sum(nonzero_consts)
    all_consts = [*consts, *select(const_tangents, nonzero_consts)]
    all_carries = [
        *carries,
        *map(_jax.ad.instantiate_zeros, select(carry_tangents, nonzero_carries)),
    ]
    new = new.replace(
        invars=[
            *primal_vars[:num_consts],
            *tangent_vars[:num_const_tangents],
            *primal_vars[num_consts:],
            *tangent_vars[num_const_tangents:],
        ],
    ).with_consts(all_consts)
    flat, new_tree = jax.tree.flatten((lower, upper, step, all_consts, all_carries))
    outs = _jax.sc_primitives.parallel_loop_p.bind(*flat, tree=new_tree, unroll=unroll, jaxpr=new)
    primal_outs = outs[: len(carries)]
    return primal_outs, _spread(outs[len(carries) :], nonzero_carries, primal_outs)


def _tangent_of_ref(ref: Any, tangent: Any, what: str) -> Any | None:
    """Returns the view of the tangents that `ref` is of the primals, or None if there is none.

    Args:
      ref: a Ref, or a TransformedRef.
      tangent: the same structure with the tangents of its parts.
      what: the operation, for messages.
    """
    if not isinstance(ref, _jax.TransformedRef):
        return None if _is_zero(tangent) else tangent
    parts = tangent.ref if isinstance(tangent.ref, Sequence) else (tangent.ref,)
    if all(map(_is_zero, parts)):
        return None
    if any(isinstance(transform, _jax.BitcastTransform) for transform in ref.transforms):
        raise NotImplementedError(f"{what} of a float Ref seen as another type has no derivative")
    return dataclasses.replace(ref, ref=tangent.ref)


def _dma_jvp(primitive: Any, name: str, both_needed: bool) -> Callable[..., Any]:
    def rule(
        primals: Sequence[Any], tangents: Sequence[Any], *, tree: Any, **params: Any
    ) -> tuple[list[Any], list[Any]]:
        """Does with the Refs of tangents what is done with those of the primals."""
        primitive.bind(*primals, tree=tree, **params)
        source, destination, *rest = tree.unflatten(primals)
        source_tangent, destination_tangent, *_ = tree.unflatten(tangents)
        new_source = _tangent_of_ref(source, source_tangent, name)
        new_destination = _tangent_of_ref(destination, destination_tangent, name)
        if both_needed and (new_source is None) != (new_destination is None):
            raise NotImplementedError(
                f"{name} between a Ref with tangents and one without has no derivative"
            )
        if new_destination is not None:
            # A wait looks at its source's type only, so there the primal one will do.
            new_source = source if new_source is None else new_source
            operands = _jax.flatten_to_tree((new_source, new_destination, *rest))
            primitive.bind(*operands.vals, tree=operands.tree, **params)
        return [], []

    return rule


def _linear_in_first(primitive: Any, also_second: bool = False) -> Callable[..., Any]:
    """Makes the rule of an operation that is linear in its first (and second) operand."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        out = primitive.bind(*primals, **params)
        if _is_zero(tangents[0]):
            return out, _zero_of(out)
        changed = [tangents[0]]
        if also_second:
            changed.append(_jax.ad.instantiate_zeros(tangents[1]))
        return out, primitive.bind(*changed, *primals[len(changed) :], **params)

    return rule


def _scatter_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, tree: Any, **params: Any
) -> tuple[list[Any], list[Any]]:
    scatter = _jax.sc_primitives.scatter_p
    scatter.bind(*primals, tree=tree, **params)
    ref_tangent, _, _, x_tangent, _ = jax.tree.unflatten(tree, tangents)
    if not _is_zero(ref_tangent):
        ref, transforms, indices, _, mask = jax.tree.unflatten(tree, primals)
        del ref
        x = _jax.ad.instantiate_zeros(x_tangent)
        flat, new_tree = jax.tree.flatten((ref_tangent, transforms, indices, x, mask))
        scatter.bind(*flat, tree=new_tree, **params)
    return [], []


def _cumulative_extreme_jvp(primitive: Any) -> Callable[..., Any]:
    """Makes the rule of a prefix maximum or minimum: its tangent is that of the element it is.

    Among equal elements it is the last one.
    """

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        x, mask = primals
        out = primitive.bind(x, mask)
        if _is_zero(tangents[0]):
            return out, _zero_of(out)
        # Where nothing has been chosen yet, the prefix maximum of lanes is the lane itself, as the
        # result is the element itself.
        is_chosen = mask & ((x == out) | ((x != x) & (out != out)))
        lanes = jax.lax.iota(np.int32, x.size)
        return out, _taken(tangents[0], _jax.sc_primitives.masked_cummax_p.bind(lanes, is_chosen))

    return rule


def _sort_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, descending: bool
) -> tuple[list[Any], list[Any]]:
    """Moves the tangents to where the keys and values go."""
    sort = _jax.sc_primitives.masked_sort_p
    keys, values, *mask = primals
    outs = sort.bind(keys, values, *mask, descending=descending)
    lanes = jax.lax.iota(np.int32, keys.size)
    _, origin, *_ = sort.bind(keys, lanes, *mask, descending=descending)
    moved = [
        _zero_of(out) if _is_zero(tangent) else _taken(tangent, origin)
        for out, tangent in zip(outs, tangents, strict=True)
    ]
    return outs, moved


def _taken(vector: Any, lanes: Any) -> Any:
    return vector.at[lanes].get(mode="promise_in_bounds")


def _conversion_jvp(primitive: Any) -> Callable[..., Any]:
    """Makes the rule of packing and unpacking, which are linear between float types."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        outs = primitive.bind(*primals, **params)
        if all(map(_is_zero, tangents)):
            return outs, jax.tree.map(_zero_of, outs)
        [dtype] = {out.dtype for out in jax.tree.leaves(outs)}
        if not jnp.issubdtype(dtype, np.inexact):
            raise NotImplementedError(f"{primitive} to {dtype} has no derivative")
        return outs, primitive.bind(*map(_jax.ad.instantiate_zeros, tangents), **params)

    return rule


def _reciprocal_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    out = _jax.pallas_primitives.reciprocal_p.bind(*primals, **params)
    [tangent] = tangents
    return out, _zero_of(out) if _is_zero(tangent) else -tangent * out * out


def _without_tangents(primitive: Any) -> Callable[..., Any]:
    """Makes the rule of an operation on semaphores and integers, which have no tangents."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        if not all(map(_is_zero, tangents)):
            raise NotImplementedError(f"{primitive} has no derivative")
        out = primitive.bind(*primals, **params)
        return out, jax.tree.map(_zero_of, out)

    return rule


def _register() -> None:
    pallas, tpu, sparse = _jax.pallas_primitives, _jax.tpu_primitives, _jax.sc_primitives
    rules: dict[Any, Callable[..., Any]] = {
        pallas.run_scoped_p: _run_scoped_jvp,
        pallas.multiple_of_p: _linear_in_first(pallas.multiple_of_p),
        pallas.reciprocal_p: _reciprocal_jvp,
        _jax.broadcast_to_p: _linear_in_first(_jax.broadcast_to_p),
        tpu.roll_p: _linear_in_first(tpu.roll_p),
        tpu.dma_start_p: _dma_jvp(tpu.dma_start_p, "a DMA", True),
        tpu.dma_wait_p: _dma_jvp(tpu.dma_wait_p, "waiting for a DMA", False),
        sparse.parallel_loop_p: _parallel_loop_jvp,
        sparse.gather_p: _linear_in_first(sparse.gather_p),
        sparse.scatter_p: _scatter_jvp,
        sparse.load_p: _linear_in_first(sparse.load_p),
        sparse.swap_p: _linear_in_first(sparse.swap_p, also_second=True),
        sparse.masked_cumsum_p: _linear_in_first(sparse.masked_cumsum_p),
        sparse.masked_cummax_p: _cumulative_extreme_jvp(sparse.masked_cummax_p),
        sparse.masked_cummin_p: _cumulative_extreme_jvp(sparse.masked_cummin_p),
        sparse.masked_sort_p: _sort_jvp,
        sparse.pack_p: _conversion_jvp(sparse.pack_p),
        sparse.unpack_p: _conversion_jvp(sparse.unpack_p),
    }
    for primitive in (
        pallas.semaphore_signal_p,
        pallas.semaphore_wait_p,
        pallas.semaphore_read_p,
        sparse.fetch_and_add_p,
    ):
        rules[primitive] = _without_tangents(primitive)
    for primitive, rule in rules.items():
        # Where a release of JAX has its own rule, that one is used.
        _jax.ad.primitive_jvps.setdefault(primitive, rule)
    semaphore_rules = _jax.AbstractSemaphoreTy._rules
    if not hasattr(semaphore_rules, "tangent_dtype"):
        # JAX asks each type for that of its tangents, and knows no answer for semaphores.
        semaphore_rules.tangent_dtype = staticmethod(lambda dtype: jax.dtypes.float0)


_register()
