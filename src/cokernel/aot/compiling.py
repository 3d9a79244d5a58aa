"""Traces and lowers a function here, has it compiled elsewhere, and writes the report."""

import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from cokernel import _jax, meshes
from cokernel.aot import memory, places, schedule, targets
from cokernel.aot.places import Place
from cokernel.aot.process import Compiler, Outcome
from cokernel.aot.report import Registers, Report
from cokernel.aot.targets import Target


def compile(  # noqa: A001
    fn: Callable[..., Any], *args: Any, target: str, time_limit_s: float = 300.0
) -> Report:
    """Compiles a function, with the kernels in it, for a chip that need not be there.

    The function is traced and lowered in this process; the chip's compiler runs in another, whose
    crash is a finding like any refusal. The compiler comes with `cokernel[tpu]`, or from the Python
    that the environment variable `COKERNEL_AOT_PYTHON` names. Nothing runs: the compiler checks
    types, resources and legality, but not whether semaphores and copies are used well.

    Args:
      fn: any function of arrays that JAX can trace, for one device; kernels in it keep the meshes
        they have.
      *args: arrays, or `jax.ShapeDtypeStruct`s for them.
      target: the name of a chip, of which `cokernel.aot.TARGETS` lists all.
      time_limit_s: seconds after which the compiler is stopped.

    Raises:
      TypeError: if `fn` is not a function.
      ValueError: if there is no such target, or the time limit is not a positive number.
      CompilerMissing: if the chip's compiler is not installed; it says how to get it.
    """
    with Compiler(targets.find(target), time_limit_s) as compiler:
        return compile_with(compiler, fn, *args)


def compile_with(compiler: Compiler, fn: Callable[..., Any], *args: Any) -> Report:
    """Like `compile`, with a compiler that is started already and serves several functions."""
    if not callable(fn):
        raise TypeError(f"what is compiled is a function of arrays, got {fn!r}")
    target = compiler.target
    name = getattr(fn, "__name__", None) or type(fn).__name__
    try:
        with _lowering_for(target):
            traced = jax.jit(fn).trace(*args)
    except Exception as error:
        # Whatever tracing raises is why this function cannot be compiled.
        return _not_traced(name, target, fn, error)
    jaxpr = traced.jaxpr
    budget = target.memory_budget()
    uses = [use for eqn in memory.kernels(jaxpr) for use in memory.memory_uses(eqn, budget)]

    try:
        with _lowering_for(target):
            module = _bytecode(traced.lower(lowering_platforms=(target.platform,)))
    except Exception as error:
        kind = _kind(error)
        place = places.find(jaxpr, lambda shorter: _kind(_lower(shorter, target)) == kind)
        place = place or _kernel_at_fault(jaxpr, uses)
        return dataclasses.replace(_refused_here(name, target, "lower", error, place), memory=uses)

    outcome = compiler.compile(module)
    if outcome.compiled is None:
        place = None
        if not (outcome.crashed and any(use.exceeds for use in uses)):
            # For want of memory compilers also crash, and then any operation may look guilty.
            place = _place_of_refusal(jaxpr, outcome, compiler)
        place = place or _kernel_at_fault(jaxpr, uses)
        return Report(
            function=name,
            target=target.name,
            accepted=False,
            stage="compile",
            message=_readable(outcome.error),
            crashed=outcome.crashed,
            timed_out=outcome.timed_out,
            place=place,
            memory=uses,
        )
    sizes = dict(outcome.compiled["memory"])
    calls = schedule.calls(outcome.compiled["hlo"])
    problems = schedule.problems(calls)
    registers = [Registers(**found) for found in outcome.compiled["registers"]]
    return Report(
        function=name,
        target=target.name,
        accepted=not problems,
        stage="schedule" if problems else "",
        message="; ".join(problems),
        place=_kernel_of_problem(jaxpr, problems),
        seconds=outcome.compiled["seconds"],
        memory=uses,
        code_bytes=sizes.pop("generated_code_size", 0) or _code_of(registers),
        compiler_bytes=sizes,
        hbm_bytes=target.memory_budget()["HBM"],
        calls=calls,
        registers=registers,
    )


def _code_of(registers: Sequence[Registers]) -> int | None:
    """Returns the size of the machine code of a GPU's kernels, None where it is not known."""
    sizes = [found.code_bytes for found in registers]
    return sum(size for size in sizes if size is not None) or None


class _lowering_for:
    """The context in which a function is traced and lowered for a chip."""

    def __init__(self, target: Target):
        self._contexts = (
            # JAX asks the mesh what chip it is for, and in some inner functions the device.
            meshes.target_or_nothing(target.name if target.platform == "tpu" else None),
            jax.sharding.use_abstract_mesh(target.abstract_mesh()),
            # A compiler's message names the user's line only if the kernel's code has it.
            _jax.config.jax_mosaic_unzip_debug_locations(False),
        )

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc_info)


def _bytecode(lowered: Any) -> bytes:
    buffer = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(buffer)
    return buffer.getvalue()


def _lower(jaxpr: Any, target: Target) -> bytes | Exception:
    """Returns the module for a traced function, or why it cannot be lowered."""
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.invars]
    try:
        with _lowering_for(target):
            function = jax.jit(_jax.jaxpr_as_fun(jaxpr))
            return _bytecode(function.trace(*avals).lower(lowering_platforms=(target.platform,)))
    except Exception as error:
        # Only whether it happens, and whether it is the same as before, is of interest.
        return error


def _place_of_refusal(jaxpr: Any, outcome: Outcome, compiler: Compiler) -> Place | None:
    kind = _kind(outcome.error)

    def is_refused(shorter: Any) -> bool:
        module = _lower(shorter, compiler.target)
        if isinstance(module, Exception):
            # That it cannot be lowered comes from what was left out.
            return False
        found = compiler.compile(module)
        return found.compiled is None and _kind(found.error) == kind

    return places.find(jaxpr, is_refused)


def _kernel_of_problem(jaxpr: Any, problems: Sequence[str]) -> Place | None:
    """Returns the kernel whose calls do not go together in the schedule."""
    for eqn in memory.kernels(jaxpr) if problems else ():
        if repr(memory.kernel_name(eqn)) in problems[0]:
            info = eqn.params["jaxprs"][0].debug_info
            line = places.line_in_text(info.func_src_info or "")
            return Place(info.func_name, line, "the calls of the kernel it belongs to")
    return None


_ASSEMBLER_ERROR = re.compile(r"ptxas \S+, line \d+; (?:error|fatal)\s*: (.*)")


def _readable(message: str) -> str:
    """Returns a compiler's message; of the GPU's assembler, which repeats itself and names files of
    its own, what it says of the program, each once."""
    errors = dict.fromkeys(error.strip() for error in _ASSEMBLER_ERROR.findall(message))
    return f"ptxas: {'; '.join(errors)}" if errors else message.strip()


def _kind(refusal: Any) -> str:
    """Returns how a message or error begins, before the names and numbers of what it is about."""
    if isinstance(refusal, Exception):
        return f"{type(refusal).__name__}: {str(refusal)[:30]}"
    return refusal[:30] if isinstance(refusal, str) else ""


def _kernel_at_fault(jaxpr: Any, uses: list[memory.MemoryUse]) -> Place | None:
    """Returns the kernel that is refused whatever its programs do, such as for its memory."""
    equations = memory.kernels(jaxpr)
    if not equations:
        return None
    excessive = {use.kernel for use in uses if use.exceeds}
    at_fault = [eqn for eqn in equations if memory.kernel_name(eqn) in excessive] or equations
    info = at_fault[0].params["jaxprs"][0].debug_info
    largest = [use for use in uses if use.kernel == memory.kernel_name(at_fault[0])]
    largest.sort(key=lambda use: (use.exceeds, use.asked), reverse=True)
    what = "the kernel as a whole"
    if largest and largest[0].exceeds:
        what = f"the kernel's memory, of which the largest piece is {largest[0].largest}"
    line = places.line_in_text(info.func_src_info or "")
    return Place(info.func_name, line, what)


def _not_traced(name: str, target: Target, fn: Any, error: Exception) -> Report:
    refused = _refused_here(name, target, "trace", error, None)
    line = places.line_of_definition(fn)
    if refused.place is None and line:
        place = Place("", line, "an error while JAX traces it")
        refused = dataclasses.replace(refused, place=place)
    if targets.MESH_AXIS in refused.message:
        # It is in no program's way but that of shard_map, which has a mesh of devices of its own.
        advice = (
            "A function is compiled for one device: name the one that shard_map maps, with the "
            "types of one device's share"
        )
        refused = dataclasses.replace(refused, message=f"{refused.message}\n{advice}")
    return refused


_DOING = {"trace": "traces", "lower": "lowers"}


def _refused_here(
    name: str, target: Target, stage: str, error: Exception, place: Place | None
) -> Report:
    message = f"{type(error).__name__}: {error}"
    if place is None or not place.line:
        line = places.line_of_error(error) or places.line_in_text(message)
        place = Place("", line, f"an error while JAX {_DOING[stage]} it") if line else None
    return Report(
        function=name,
        target=target.name,
        accepted=False,
        stage=stage,
        message=message,
        place=place,
    )
