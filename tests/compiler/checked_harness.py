"""Compiles kernels for checked mode, and tells what their code says it does, without running it."""

import collections
import re
from collections.abc import Callable
from typing import Any

import jax

from cokernel import _runtime
from cokernel.checking.options import Checked
from cokernel.compiler.kernel import CompiledKernel, Kernel
from cokernel.primitive import all_equations, mpmd_map_p

KINDS = {0: "read", 1: "write", 2: "atomic", 3: "update", 4: "fetch_and_add", 5: "poll"}
_ACCESS = re.compile(r"cokernel_checked_access\w*\"\(ptr [^,]*, i32 (\d+), i32 (\d+)")
_CALL = re.compile(r'call \S+ @"(cokernel_\w+)"')


def compile_kernel(
    kernel: Callable[..., Any], *arrays: Any, checked: Checked | None
) -> CompiledKernel:
    """The code of a kernel for these arrays, in checked or in native mode."""
    jaxpr = jax.make_jaxpr(kernel)(*arrays)
    [eqn] = [eqn for eqn in all_equations(jaxpr.jaxpr) if eqn.primitive is mpmd_map_p]
    params = eqn.params
    return Kernel(
        params["name"] or "kernel",
        params["jaxprs"],
        params["meshes"],
        params["external_meshes"],
        operand_count=len(eqn.invars),
        result_count=len(params["out_avals"]),
        aliases=params["input_output_aliases"],
        outer_axes=[],
        outer_sizes=[],
        bounds_checks=True,
        offsets=_runtime.abi_offsets(),
        checked=checked,
    ).compile()


def accesses(compiled: CompiledKernel) -> collections.Counter[tuple[str, str, str]]:
    """The probes in a kernel's code: (kind, Ref, operation), each with how often it is written."""
    found: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for site, kind in _ACCESS.findall(compiled.ir):
        entry = compiled.sites[int(site)]
        found[KINDS[int(kind)], entry["name"], entry["operation"]] += 1
    return found


def calls(compiled: CompiledKernel) -> collections.Counter[str]:
    """The functions of the runtime that a kernel's code calls, and at how many places."""
    return collections.Counter(_CALL.findall(compiled.ir))
