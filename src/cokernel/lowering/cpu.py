"""CPU: compiles a kernel with LLVM and calls it through one XLA custom call."""

import collections
import dataclasses
import functools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from cokernel import _jax, _runtime, meshes, parameters, primitive, source_lines
from cokernel.checking.options import Checked, from_interpret
from cokernel.compiler import blas, cache, codegen, fingerprint
from cokernel.lowering import CPU_CALL_TARGET, gpu_interpret

# How many kernels stay in memory as machine code; each takes some 250 KB.
REGISTERED_KERNELS = 1024

_registration_lock = threading.Lock()
# The keys of the kernels that can be loaded again, oldest first.
_reloadable: collections.deque[int] = collections.deque()


def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers a kernel to a custom call of the runtime. See `primitive.py` for the parameters.

    Raises:
      NotImplementedError: for a primitive that can be neither compiled nor run through XLA.
      ValueError: for checked mode with padded_tiles=True where no chip is set.
    """
    if any(map(meshes.is_gpu_mesh, params["meshes"])):
        return gpu_interpret.lower(ctx, *operands, **params)
    options = parameters.resolve(params["compiler_params"])
    outer = _outer_axes(ctx, params)
    checked = from_interpret(params["interpret"])
    if checked is not None and checked.padded_tiles and meshes.current_target() is None:
        raise ValueError(
            f'kernel {params["name"]!r}: padded_tiles=True of checked mode (buffer_bounds="padded"'
            " of pltpu.InterpretParams) needs to know whose tiles: make the kernel under"
            " `with cokernel.target(chip):`, or call cokernel.set_target(chip) first"
        )
    text, module, callbacks = _module(ctx, params, options, outer, checked)
    if options.dump_llvm:
        print(module["ir"])
    key = _key(text, callbacks)
    with _registration_lock:
        if not _runtime.executable_is_registered(key):
            _register(key, module, callbacks)
    extra = [_axis_index(ctx, axis) for axis in outer]
    scalar = _jax.ShapedArray((), np.dtype(np.int32))
    # An array of random keys travels as the words it is made of.
    avals_in, avals_out = (
        [_jax.physical_aval(aval) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)
    )
    operands = tuple(
        _convert(ctx, operand, aval, _in_bytes(aval))
        for operand, aval in zip(operands, avals_in, strict=True)
    )
    call_ctx = ctx.replace(
        avals_in=[*map(_in_bytes, avals_in), *[scalar] * len(extra)],
        avals_out=[_in_bytes(aval) for aval in avals_out],
    )
    rule = jax.ffi.ffi_lowering(
        CPU_CALL_TARGET,
        operand_output_aliases=dict(params["input_output_aliases"]),
        # XLA makes a call with side effects dearer, so only a kernel that prints, calls back or
        # communicates is one.
        has_side_effect=options.has_side_effects
        or primitive.has_side_effects(ctx.avals_in, params),
    )
    # On the CPU calls with side effects run one after the other in the order of the program, so
    # the tokens of ordered effects have nothing to add.
    if len(ctx.tokens_in):
        ctx.set_tokens_out(ctx.tokens_in)
    signed = key - (1 << 64) if key >= 1 << 63 else key
    # With callbacks the module means nothing in another process, so its text stays here.
    results = rule(
        call_ctx, *operands, *extra, key=np.int64(signed), module="" if callbacks else text
    )
    return [
        _convert(ctx, result, _in_bytes(aval), aval)
        for result, aval in zip(results, avals_out, strict=True)
    ]


def _in_bytes(aval: Any) -> Any:
    """The aval with whole bytes for elements: XLA packs several elements of int4 or int2 into one
    byte, whereas in a kernel each has a byte of its own."""
    if not isinstance(aval, _jax.ShapedArray) or aval.dtype not in _BYTES_FOR:
        return aval
    return aval.update(dtype=_BYTES_FOR[aval.dtype])


_BYTES_FOR = {
    np.dtype(ml_dtypes.int2): np.dtype(np.int8),
    np.dtype(ml_dtypes.int4): np.dtype(np.int8),
    np.dtype(ml_dtypes.uint2): np.dtype(np.uint8),
    np.dtype(ml_dtypes.uint4): np.dtype(np.uint8),
    np.dtype(ml_dtypes.float4_e2m1fn): np.dtype(np.uint8),
}


def _convert(ctx: Any, value: Any, source: Any, target: Any) -> Any:
    """An MLIR value of the aval `source` as one of the aval `target`."""
    if source is target:
        return value

    def convert(x: Any) -> Any:
        # Of a float its bits.
        if source.dtype == ml_dtypes.float4_e2m1fn:
            x = jax.lax.bitcast_convert_type(x, jax.numpy.uint4)
        if target.dtype == ml_dtypes.float4_e2m1fn:
            return jax.lax.bitcast_convert_type(x.astype(jax.numpy.uint4), target.dtype)
        return x.astype(target.dtype)

    rule = _jax.mlir.lower_fun(convert, multiple_results=False)
    [converted] = rule(ctx.replace(avals_in=[source], avals_out=[target]), value)
    return converted


def _module(
    ctx: Any,
    params: Mapping[str, Any],
    options: parameters.CompilerParams,
    outer: Mapping[Any, int],
    checked: Checked | None,
) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """The module as text and as plain data, from the cache if it is there, and the callbacks that
    go with it."""
    name = _cache_name(ctx, params, options, outer, checked)
    stored = None if name is None else cache.read(name)
    if stored is not None:
        text = stored.decode()
        module = json.loads(text)
        if blas.offers_all(module["ir"]):
            return text, module, []
    module, callbacks = _compile(ctx, params, options, outer, checked)
    text = json.dumps(module, separators=(",", ":"))
    # What calls Python functions means nothing in another process.
    if name is not None and not callbacks:
        cache.write(name, text.encode())
    return text, module, callbacks


def _cache_name(
    ctx: Any,
    params: Mapping[str, Any],
    options: parameters.CompilerParams,
    outer: Mapping[Any, int],
    checked: Checked | None,
) -> str | None:
    """The name under which the kernel's module is cached; None if it cannot be."""
    if cache.cache_folder() is None:
        return None
    kernel = {
        name: params[name]
        for name in ("name", "jaxprs", "meshes", "external_meshes", "input_output_aliases")
    }
    made_at = None if checked is None else (_made_at(params), params.get("batch", ()))
    counts = len(ctx.avals_in), len(params["out_avals"])
    surroundings = dict(outer), meshes.current_target(), codegen.host(), _runtime.abi_offsets()
    try:
        digest = fingerprint.fingerprint(kernel, made_at, counts, options, checked, surroundings)
    except fingerprint.Unknown:
        return None
    return f"{digest}.json"


def _compile(
    ctx: Any,
    params: Mapping[str, Any],
    options: parameters.CompilerParams,
    outer: Mapping[Any, int],
    checked: Checked | None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The module as plain data, and the callbacks that go with it."""
    # Importing the compiler takes a moment, which `import cokernel` should not.
    from cokernel.compiler.kernel import Kernel

    kernel = Kernel(
        params["name"] or "kernel",
        params["jaxprs"],
        params["meshes"],
        params["external_meshes"],
        operand_count=len(ctx.avals_in),
        result_count=len(params["out_avals"]),
        aliases=params["input_output_aliases"],
        outer_axes=list(outer),
        outer_sizes=list(outer.values()),
        bounds_checks=options.bounds_checks if checked is None else checked.bounds,
        offsets=_runtime.abi_offsets(),
        checked=checked,
        made_at=None if checked is None else _made_at(params),
    )
    compiled = kernel.compile()
    spec = dict(compiled.spec)
    spec["num_workers"] = options.num_workers or 0
    # Who names a number wants that many; otherwise helpers come when a launch lasts long enough.
    spec["help"] = "auto" if options.num_workers is None else "always"
    spec["time_limit_s"] = options.time_limit_s or 0.0
    module = {"ir": compiled.ir, "spec": spec, "sites": compiled.sites, "memory": compiled.memory}
    if checked is not None:
        # The outermost vmap first.
        spec["checked"] = {**spec["checked"], "batch": params.get("batch", ())[::-1]}
        module["checked"] = dataclasses.asdict(checked)
        module["unchecked"] = compiled.unchecked
        module["chip"] = _beyond_the_chip(ctx, params, kernel, checked)
    return module, compiled.callbacks


def _made_at(params: Mapping[str, Any]) -> source_lines.SourceLine | None:
    """The user's line that made the kernel; where it is not known, that of its first program."""
    lines = [
        params.get("made_at"),
        *(source_lines.line_of_definition(jaxpr.debug_info) for jaxpr in params["jaxprs"]),
    ]
    return next((line for line in lines if line is not None), None)


def _beyond_the_chip(
    ctx: Any, params: Mapping[str, Any], kernel: Any, checked: Checked
) -> list[dict[str, Any]]:
    """Where the kernel asks for more than its chip has, as plain data; nothing without a chip."""
    target = meshes.current_target()
    if target is None or checked.chip_limits == "off":
        return []
    from cokernel.checking import chip_limits

    parameters_before_scratch = len(ctx.avals_in) + len(params["out_avals"])
    # Those of the user: the kernel's own also hold the probes of checked mode.
    jaxprs = params["jaxprs"]
    found = chip_limits.findings(
        jaxprs,
        params["meshes"],
        kernel.program_names,
        len(jaxprs[0].invars) - parameters_before_scratch,
        target,
        _made_at(params),
    )
    return [finding.to_dict() for finding in found]


def _key(text: str, callbacks: Sequence[Mapping[str, Any]]) -> int:
    # Equal code with other Python functions behind it is another executable.
    identity = "".join(f"\n{id(callback['function'])}" for callback in callbacks)
    return codegen.key_of(text + identity)


def _register(key: int, module: Mapping[str, Any], callbacks: Sequence[Mapping[str, Any]]) -> None:
    """Compiles a module to machine code and makes it known to the runtime."""
    code = codegen.LoadedCode(codegen.compile_object(module["ir"]))
    spec: Any = dict(module["spec"])
    spec["programs"] = [
        {**program, "entry": code.address(program["entry"])} for program in spec["programs"]
    ]
    spec["report"] = functools.partial(_describe, sites=module["sites"], memory=module["memory"])
    if "checked" in module:
        from cokernel.checking.findings import Finding
        from cokernel.checking.launches import finish_launch

        spec["checked_report"] = functools.partial(
            finish_launch,
            options=Checked(**module["checked"]),
            sites=module["sites"],
            memory=module["memory"],
            not_checked=module["unchecked"],
            chip=[Finding.from_dict(plain) for plain in module["chip"]],
        )
    spec["callbacks"] = list(callbacks)
    spec["keep_alive"] = code
    _runtime.register_executable(key, spec)
    if not callbacks:
        _forget_oldest(key)


def _describe(*args: Any, **kwargs: Any) -> str:
    # Imported when something has failed, because most launches never do.
    from cokernel.checking.failures import describe

    return describe(*args, **kwargs)


def _forget_oldest(newest: int) -> None:
    """Lets go of the machine code of the kernel registered longest ago once there are many.

    A kernel that is called again is loaded from the text in its call, so this costs time only.
    """
    _reloadable.append(newest)
    if len(_reloadable) > REGISTERED_KERNELS:
        _runtime.unregister_executable(_reloadable.popleft())


def load(key: int, text: str) -> None:
    """Makes a kernel that another process compiled known to the runtime, which calls this."""
    if not text:
        raise RuntimeError(
            "this kernel calls Python functions (debug_print, callbacks or primitives that go "
            "through XLA), so it can only run in the process that made it"
        )
    with _registration_lock:
        if not _runtime.executable_is_registered(key):
            _register(key, json.loads(text), [])


def _outer_axes(ctx: Any, params: Mapping[str, Any]) -> dict[Any, int]:
    """The axes of a shard_map around the kernel that programs ask for, with their sizes."""
    own = {axis for mesh in (*params["meshes"], *params["external_meshes"]) for axis in mesh.shape}
    names: dict[Any, int] = {}
    for jaxpr in params["jaxprs"]:
        for effect in jaxpr.effects:
            if isinstance(effect, _jax.NamedAxisEffect) and effect.name not in own:
                names[effect.name] = _axis_size(ctx, effect.name)
    if any(map(_counts_devices, params["jaxprs"])):
        # Then what device_id means depends on all axes there are, in their order.
        manual = _manual_axes(ctx)
        return {**manual, **names} if manual else names
    return names


def _counts_devices(jaxpr: Any) -> bool:
    """Whether a program names devices by their coordinates or number, and not by axes."""
    for eqn in primitive.all_equations(jaxpr):
        device_id = None
        if eqn.primitive is _jax.pallas_primitives.semaphore_signal_p:
            device_id = eqn.params["args_tree"].unflatten(eqn.invars)[3]
        elif eqn.primitive is _jax.tpu_primitives.dma_start_p:
            device_id = eqn.params["tree"].unflatten(eqn.invars)[4]
        if device_id is not None and not isinstance(device_id, dict):
            return True
    return False


def _manual_axes(ctx: Any) -> dict[Any, int]:
    """All axes of the shard_map around the kernel, with their sizes."""
    context = ctx.module_context.axis_context
    manual: frozenset[Any] = getattr(context, "manual_axes", frozenset())
    return (
        {name: size for name, size in context.mesh.shape.items() if name in manual}
        if manual
        else {}
    )


def _axis_size(ctx: Any, name: Any) -> int:
    mesh = ctx.module_context.axis_context
    sizes = dict(getattr(mesh, "mesh", mesh).shape)
    return sizes[name]


def _axis_index(ctx: Any, axis: Any) -> Any:
    rule = _jax.mlir.lower_fun(lambda: jax.lax.axis_index(axis), multiple_results=False)
    scalar = _jax.ShapedArray((), np.dtype(np.int32))
    [index] = rule(ctx.replace(avals_in=[], avals_out=[scalar]))
    return index
