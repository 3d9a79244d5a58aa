"""Why a function that was to be checked has launched no kernel."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from cokernel import _jax
from cokernel.primitive import all_equations, mpmd_map_p


def no_launch(function: Callable[[], Any]) -> str:
    """What is said of a function that has launched no kernel in checked mode. It is traced, to see
    which kernels are in it.
    """
    try:
        jaxpr = jax.make_jaxpr(function)()
    except Exception as error:
        # A function may do with values what cannot be traced.
        reasons = [f"it cannot be traced to see why ({type(error).__name__})"]
    else:
        reasons = list(dict.fromkeys(_reasons(jaxpr))) or ["nothing in it calls one"]
    return f"the function launched no kernel in checked mode: {'; '.join(reasons)}"


def _reasons(jaxpr: Any) -> Iterator[str]:
    for eqn in all_equations(jaxpr):
        name = eqn.params.get("name")
        if eqn.primitive is _jax.stock_mpmd_map_p:
            name = name or "_and_".join(
                program.debug_info.func_name for program in eqn.params["jaxprs"]
            )
            yield (
                f"{_called(name)} is a stock Pallas kernel, which needs cokernel.pallas.enabled() "
                "around it"
            )
        elif eqn.primitive is _jax.pallas_call_p:
            yield (
                "pl.pallas_call is run by JAX itself, and not by Cokernel: write the kernel with "
                "cokernel.kernel or pl.kernel"
            )
        elif eqn.primitive is not mpmd_map_p:
            continue
        elif not eqn.outvars:
            yield f"XLA does not run {_called(name)}, since it has no outputs and writes to no Ref"
        elif not any(variable.aval.size for variable in eqn.outvars):
            yield (
                f"XLA does not run {_called(name)}, since its outputs have no elements: give it "
                "arguments with which it has something to write"
            )
        else:
            yield (
                f"XLA does not run {_called(name)}, since nobody uses its outputs: return them "
                "from the function"
            )


def _called(name: str | None) -> str:
    return "a kernel" if name is None else f"kernel {name!r}"
