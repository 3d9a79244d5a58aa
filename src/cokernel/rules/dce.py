"""Dead code elimination: a kernel is dropped if its outputs are unused and it does nothing else."""

from collections.abc import Sequence
from typing import Any

from cokernel import _jax, parameters
from cokernel.primitive import mpmd_map_p


def dce(
    used_outs: Sequence[bool], live_ins: Sequence[bool], eqn: Any
) -> tuple[list[bool], Any | None]:
    """Keeps the kernel whole or drops it.

    It is kept if an output is used, if it has effects such as a write to a Ref or a print, or if
    its compiler parameters say that it has side effects.
    """
    # Whether a written Ref is read later is not asked: who writes to one is never dropped.
    del live_ins
    is_needed = (
        any(used_outs)
        or _jax.partial_eval.has_effects(eqn)
        or parameters.has_side_effects(eqn.params["compiler_params"])
    )
    return [is_needed] * len(eqn.invars), eqn if is_needed else None


_jax.partial_eval.dce_rules[mpmd_map_p] = dce
