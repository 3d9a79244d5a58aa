"""What a user may ask of the compiler and the runtime, in one frozen object."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cokernel import _jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerParams:
    """How a kernel is compiled and run on a CPU.

    Attributes:
      bounds_checks: whether dynamic indices and DMA windows are checked. Without checks an index
        out of range reads or writes memory that is not the Ref's.
      num_workers: how many worker threads take part in a launch, from its start. None means at
        most as many as there are processors, and only the calling thread while a launch is short.
      time_limit_s: seconds after which a launch that has not ended is stopped with an error; None
        means no limit.
      has_side_effects: whether the kernel must run even where nobody uses its outputs.
      collective_id: which barrier semaphore `pltpu.get_barrier_semaphore` returns; kernels with
        the same number share it.
      dump_llvm: whether the LLVM IR of each program is printed when the kernel is compiled.

    Raises:
      TypeError: if a field has the wrong type.
      ValueError: if a number is out of its range.
    """

    bounds_checks: bool = True
    num_workers: int | None = None
    time_limit_s: float | None = None
    has_side_effects: bool = False
    collective_id: int | None = None
    dump_llvm: bool = False

    def __post_init__(self):
        for name in ("bounds_checks", "has_side_effects", "dump_llvm"):
            _check_type(name, getattr(self, name), bool)
        if self.num_workers is not None:
            _check_type("num_workers", self.num_workers, int)
            if self.num_workers < 1:
                raise ValueError(f"num_workers must be at least 1, got {self.num_workers}")
        if self.time_limit_s is not None:
            _check_type("time_limit_s", self.time_limit_s, (int, float))
            # Written so that NaN is refused too.
            if not self.time_limit_s > 0:
                raise ValueError(
                    f"time_limit_s must be a positive number of seconds, got {self.time_limit_s}"
                )
        if self.collective_id is not None:
            _check_type("collective_id", self.collective_id, int)

    # Pallas expects compiler parameters to offer this.
    replace = dataclasses.replace


def _check_type(name: str, value: Any, expected: type | tuple[type, ...]) -> None:
    is_misplaced_bool = isinstance(value, bool) and expected is not bool
    if is_misplaced_bool or not isinstance(value, expected):
        types = expected if isinstance(expected, tuple) else (expected,)
        wanted = " or ".join(t.__name__ for t in types)
        raise TypeError(f"{name} must be of type {wanted}, got {value!r} of {type(value).__name__}")


def check(compiler_params: Any) -> None:
    """Raises TypeError unless `compiler_params` is of a kind that Cokernel understands."""
    if compiler_params is None:
        return
    known = isinstance(compiler_params, CompilerParams | _jax.TpuCompilerParams)
    if not known and not is_for_gpu(compiler_params):
        raise TypeError(
            "compiler_params must be a cokernel.CompilerParams, a pltpu.CompilerParams, a "
            f"plgpu.CompilerParams or None, got {compiler_params!r} of type "
            f"{type(compiler_params).__name__}"
        )


def is_for_gpu(compiler_params: Any) -> bool:
    """Returns whether these are the parameters of JAX's Mosaic GPU."""
    # Their module is loaded if there are any, and takes too long to load otherwise.
    return type(compiler_params).__module__.startswith("jax._src.pallas.mosaic_gpu.")


def check_descriptions(name: Any, metadata: Any, cost_estimate: Any) -> None:
    """Raises TypeError unless these describe a kernel as `mpmd_map` says."""
    if name is not None:
        _check_type("name", name, str)
    if metadata is not None:
        _check_type("metadata", metadata, Mapping)
        for key, value in metadata.items():
            _check_type("each key of metadata", key, str)
            _check_type(f"metadata[{key!r}]", value, str)
    if cost_estimate is not None:
        _check_type("cost_estimate", cost_estimate, _jax.CostEstimate)


def check_aliases(input_output_aliases: Any) -> None:
    """Raises TypeError unless these are indices of outputs by indices of inputs, or None."""
    if input_output_aliases is None:
        return
    _check_type("input_output_aliases", input_output_aliases, Mapping)
    for in_index, out_index in input_output_aliases.items():
        _check_type("each key of input_output_aliases", in_index, int)
        _check_type(f"input_output_aliases[{in_index}]", out_index, int)


def resolve(compiler_params: Any) -> CompilerParams:
    """Returns what `compiler_params` means on a CPU.

    JAX's TPU parameters are accepted: those that mean something on a CPU are taken over, and those
    that speak of the TPU's compiler are ignored.

    Raises:
      TypeError: for anything but cokernel.CompilerParams, pltpu.CompilerParams and None.
    """
    check(compiler_params)
    match compiler_params:
        case None:
            return CompilerParams()
        case CompilerParams():
            return compiler_params
        case _ if is_for_gpu(compiler_params):
            raise TypeError(f"a kernel without GPU programs cannot have {compiler_params!r}")
        case _:
            return CompilerParams(
                bounds_checks=not compiler_params.disable_bounds_checks,
                has_side_effects=has_side_effects(compiler_params),
                collective_id=compiler_params.collective_id,
            )


def has_side_effects(compiler_params: Any) -> bool:
    """Returns whether these parameters of any kind ask that the kernel is never dropped."""
    effects = getattr(compiler_params, "has_side_effects", False)
    if isinstance(effects, _jax.SideEffectType):
        # A "dataflow" effect may be dropped when unused, which is what a kernel without the flag
        # allows as well.
        return effects is _jax.SideEffectType.SIDE_EFFECTING
    return bool(effects)


def gpu_interpreter_params(interpret: Any, checked: Any) -> Any:
    """Returns how JAX's interpreter runs a kernel of GPU programs, or False if it does not.

    Args:
      interpret: what the user passed.
      checked: the checks that hold, of the kernel or around it, or None.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if isinstance(interpret, plgpu.InterpretGPUParams):
        return interpret
    if checked is not None:
        return plgpu.InterpretGPUParams(detect_races=True)
    return plgpu.InterpretGPUParams() if interpret else False
