"""Masks of undefined elements through the matrix units of a TensorCore."""

from typing import Any

import jax
import jax.numpy as jnp

from cokernel import _jax
from cokernel.compiler.definedness import (
    Mask,
    Scope,
    bools,
    load_staged_p,
    mark_queue_p,
    mark_staged_p,
    queue_undefined_p,
    weights_undefined_p,
)
from cokernel.compiler.definedness_memory import VIEW, mark, undefined
from cokernel.compiler.definedness_rules import rule
from cokernel.compiler.definedness_sources import (
    ANYWHERE,
    broadcast_in,
    reduced,
    then,
    transposed,
)
from cokernel.compiler.layout import space_of

TPU = _jax.tpu_primitives


@rule(TPU.matmul_push_rhs_p)
def _matmul_push_rhs(scope: Scope, eqn: Any) -> list[Mask]:
    [weights] = eqn.invars
    number, register = eqn.params["mxu_index"], eqn.params["staging_register"]
    shape = tuple(weights.aval.shape)
    shape = shape[::-1] if eqn.params["transpose"] else shape
    scope.origins.weights[number] = shape
    scope.eqns.append(eqn)
    mask = scope.mask(weights)
    if mask is not None:
        if eqn.params["transpose"]:
            mask = scope.call(eqn, lambda mask: mask.T, [mask], shape, transposed((1, 0)))
        params = {"number": number, "register": register, "reads": scope.reads(mask)}
        scope.emit(eqn, mark_staged_p, [mask], [], params)
    return []


def _product(scope: Scope, eqn: Any, left: Any, number: int) -> tuple[Any, Mask]:
    """The equation of a product once the weights are loaded, and the mask of the product; None
    where nothing was ever pushed.
    """
    shape = scope.origins.weights.get(number)
    if shape is None:
        return eqn, None
    register = eqn.params["load_staged_rhs"]
    if register is not None:
        # In front of the product, so that the read of the weights is not the last access when the
        # result is marked.
        scope.emit(eqn, load_staged_p, [], [], {"number": number, "register": register})
        eqn = eqn.replace(params={**eqn.params, "load_staged_rhs": None})
    read, weights = scope.read(eqn, shape)
    params = {"number": number, "operation": eqn.primitive.name, "read": read}
    scope.emit(eqn, weights_undefined_p, [], [weights], params)
    size = (left.aval.shape[0], shape[1])
    mask = scope.mask(left)

    columns = then((reduced((0,)), size[1:]), broadcast_in((1,)))

    def of_weights(weights: Any) -> Any:
        return jnp.broadcast_to(weights.any(axis=0, keepdims=True), size)

    if mask is None:
        return eqn, scope.call(eqn, of_weights, [weights], size, columns)
    return eqn, scope.call(
        eqn,
        lambda weights, mask: of_weights(weights) | mask.any(axis=1, keepdims=True),
        [weights, mask],
        size,
        (columns, then((reduced((1,)), size[:1]), broadcast_in((0,)))),
    )


@rule(TPU.matmul_acc_lhs_p)
def _matmul_acc_lhs(scope: Scope, eqn: Any) -> list[Mask]:
    ref, left, *flat = eqn.invars
    transforms = jax.tree.unflatten(eqn.params["acc_transforms_tree"], flat)
    eqn, product = _product(scope, eqn, left, space_of(ref.aval)[0].mxu_id)
    scope.eqns.append(eqn)
    mark(scope, eqn, VIEW, (ref, transforms), product)
    return []


@rule(TPU.matmul_pop_p)
def _matmul_pop(scope: Scope, eqn: Any) -> list[Mask]:
    ref, *flat = eqn.invars
    transforms = jax.tree.unflatten(eqn.params["acc_transforms_tree"], flat)
    # Popping clears the accumulator, and with it what was undefined there.
    result = undefined(scope, eqn, VIEW, (ref, transforms), eqn.outvars[0].aval.shape)
    scope.eqns.append(eqn)
    return [result]


@rule(TPU.matmul_lhs_fifo_p)
def _matmul_lhs_fifo(scope: Scope, eqn: Any) -> list[Mask]:
    [left] = eqn.invars
    number = eqn.params["mxu_index"]
    eqn, product = _product(scope, eqn, left, number)
    scope.eqns.append(eqn)
    masks = [] if product is None else [product]
    # The runtime is told of one row after the other, without saying which.
    reads = tuple((read, ANYWHERE) for read, _ in scope.reads(product))
    params = {"number": number, "rows": left.aval.shape[0], "reads": reads}
    scope.emit(eqn, mark_queue_p, masks, [], params)
    return []


@rule(TPU.matmul_pop_fifo_p)
def _matmul_pop_fifo(scope: Scope, eqn: Any) -> list[Mask]:
    read, _ = scope.read(eqn, ())
    result = _jax.Var(bools(eqn.params["shape"]))
    scope.origins.add(result, {read: ANYWHERE})
    params = {"number": eqn.params["mxu_index"], "read": read}
    scope.emit(eqn, queue_undefined_p, [], [result], params)
    scope.eqns.append(eqn)
    return [result]
