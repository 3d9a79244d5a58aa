"""How a kernel looks in a printed jaxpr: its programs by name, and what is not as usual."""

from typing import Any

from cokernel import _jax
from cokernel.primitive import mpmd_map_p

_USUAL = {
    "compiler_params": None,
    "cost_estimate": None,
    "debug": False,
    "external_meshes": (),
    "input_output_aliases": (),
    "interpret": False,
    "metadata": None,
    "target": None,
}


def pretty_print(eqn: Any, context: Any, settings: Any) -> Any:
    """Returns the text of an equation that launches a kernel, as JAX lays text out."""
    params = {"name": eqn.params["name"]}
    for name, usual in _USUAL.items():
        if eqn.params[name] != usual:
            params[name] = eqn.params[name]
    for mesh, jaxpr in zip(eqn.params["meshes"], eqn.params["jaxprs"], strict=True):
        params[f"{jaxpr.debug_info.func_name} on {mesh}"] = jaxpr
    return _jax.print_equation(eqn.replace(params=params), context, settings, list(params))


_jax.pp_eqn_rules[mpmd_map_p] = pretty_print
