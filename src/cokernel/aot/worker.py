"""Compiles lowered modules for a chip that is not there: the program that runs in a subprocess.

Its interpreter may be one that has the vendor's compiler and JAX but no Cokernel, so it imports
nothing of Cokernel but the list of private names, and that by its path.

  python worker.py SETTINGS

SETTINGS is a JSON object: `platform`, `topology`, `topology_options`, `modules` (what has to be
importable) and `versions` (those of jax and jaxlib in the process that lowers). The worker writes
one line of JSON when it is ready, `{"ready": true}` or `{"missing": ...}`; then, for every line on
standard input, which names the file of a StableHLO module, one line of JSON: what compiled, or
`error`, the compiler's message.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import time
from types import ModuleType
from typing import Any


def _private_names() -> ModuleType:
    path = pathlib.Path(__file__).parents[1] / "_jax.py"
    spec = importlib.util.spec_from_file_location("cokernel_private_jax_names", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _missing(settings: dict[str, Any]) -> str | None:
    """Returns what this interpreter lacks, as a sentence's end, or None."""
    absent = [name for name in ("jax", *settings["modules"]) if not _is_importable(name)]
    if absent:
        return f"has no module {', '.join(absent)}"
    found = {name: importlib.metadata.version(name) for name in settings["versions"]}
    if found != settings["versions"]:
        return f"has {found}, while the kernel is lowered by {settings['versions']}"
    return None


def _find_ptxas() -> None:
    """Lets XLA find the assembler of NVIDIA's wheel, if it is installed."""
    for folder in sys.path:
        for found in pathlib.Path(folder).glob("nvidia/*/bin/ptxas"):
            os.environ["PATH"] = f"{found.parent}{os.pathsep}{os.environ.get('PATH', '')}"
            return


_ENTRY = re.compile(r"Compiling entry function '(?P<kernel>[^']*)'")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_USED = re.compile(r"Used (?P<registers>\d+) registers")


def _registers() -> list[dict[str, Any]]:
    """Returns what ptxas said of each GPU kernel since this was asked before."""
    folder = os.environ.get("MOSAIC_GPU_DUMP_TO")
    if folder is None:
        return []
    found = []
    for path in sorted(pathlib.Path(folder).iterdir()):
        if path.suffix == ".ptxas":
            text = path.read_text()
            entry, spills, used = (e.search(text) for e in (_ENTRY, _SPILLS, _USED))
            if entry and spills and used:
                found.append(
                    {
                        "kernel": entry["kernel"].removesuffix("_mosaic_gpu_kernel"),
                        "registers": int(used["registers"]),
                        "spilled_bytes": int(spills["stores"]) + int(spills["loads"]),
                        "code_bytes": _code_bytes(path.with_suffix(".ptx")),
                    }
                )
    for path in pathlib.Path(folder).iterdir():
        path.unlink()
    return found


_PTX_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)


def _code_bytes(ptx: pathlib.Path) -> int | None:
    """Returns the size of the machine code that ptxas makes of a file, None if it makes none."""
    target = _PTX_TARGET.search(ptx.read_text())
    cubin = ptx.with_suffix(".cubin")
    if target is None:
        return None
    command = ["ptxas", "-arch", target[1], str(ptx), "-o", str(cubin)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return None
    return _size_of_sections(cubin.read_bytes(), b".text.")


def _size_of_sections(elf: bytes, prefix: bytes) -> int:
    """Returns the bytes of all sections of a 64-bit ELF file whose name starts in a given way."""
    [table] = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", elf, 0x3A)
    sections = [
        # Name, type, flags, address, offset, size.
        struct.unpack_from("<IIQQQQ", elf, table + index * entry_size)
        for index in range(count)
    ]
    names = sections[names_index][4]
    return sum(section[5] for section in sections if elf.startswith(prefix, names + section[0]))


def _make_kernels_new(module: Any, salt: int, ir: Any) -> None:
    """Changes the hash by which Mosaic GPU knows each kernel of a module again: one that it has
    compiled before, it would neither compile nor measure."""

    def visit(operation: Any) -> Any:
        attributes = operation.attributes
        config = attributes.get("mhlo.backend_config", None)
        if isinstance(config, ir.DictAttr) and "kernel_hash" in config:
            entries = {entry.name: entry.attr for entry in config}
            known = ir.StringAttr(entries["kernel_hash"]).value_bytes
            new = hashlib.sha256(known + str(salt).encode()).digest()
            entries["kernel_hash"] = ir.StringAttr.get(new)
            attributes["mhlo.backend_config"] = ir.DictAttr.get(entries)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)


class Compiler:
    """The compiler of one chip."""

    def __init__(self, settings: dict[str, Any]):
        from jax.experimental import topologies

        self._names = _private_names()
        self._compiled = 0
        if settings["platform"] == "cuda":
            _find_ptxas()
            # Tells the compiler where its runtime library is.
            importlib.import_module("jax.experimental.mosaic.gpu")
        self._topology_name = settings["topology"]
        self._devices: Any = topologies.get_topology_desc(
            settings["topology"], platform=settings["platform"], **settings["topology_options"]
        ).devices

    def compile(self, path: str) -> dict[str, Any]:
        """Compiles the module in a file and returns what the compiler says of it.

        Raises:
          Exception: whatever the compiler raises about a module that it refuses.
        """
        import numpy as np

        names = self._names
        with names.mlir.make_ir_context():
            module = names.mlir.ir.Module.parse(pathlib.Path(path).read_bytes())
            attributes = module.operation.attributes
            replicas, partitions = (
                attributes[name].value if name in attributes else 1
                for name in ("mhlo.num_replicas", "mhlo.num_partitions")
            )
            devices = tuple(self._devices[: replicas * partitions])
            if len(devices) < replicas * partitions:
                raise ValueError(
                    f"the function runs on {replicas * partitions} devices, but the machine that "
                    f"is compiled for, {self._topology_name}, has {len(self._devices)}"
                )
            self._compiled += 1
            _make_kernels_new(module, self._compiled, names.mlir.ir)
            ids = np.array([device.id for device in devices]).reshape(replicas, partitions)
            options = names.get_compile_options(replicas, partitions, device_assignment=ids)
            began = time.perf_counter()
            executable = devices[0].client.compile(
                module, names.jaxlib_extension.DeviceList(devices), options
            )
            seconds = time.perf_counter() - began
        statistics = executable.get_compiled_memory_stats()
        return {
            "registers": _registers(),
            "seconds": seconds,
            "hlo": "\n".join(module.to_string() for module in executable.hlo_modules()),
            "memory": {
                name.removesuffix("_in_bytes"): getattr(statistics, name)
                for name in dir(statistics)
                if name.endswith("_in_bytes") and not name.startswith("host_")
            },
        }


@contextlib.contextmanager
def _own_standard_output() -> Any:
    """Yields a file that writes to standard output, while what compilers print there goes to
    standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out


def main(settings_text: str) -> None:
    """Answers requests until standard input ends."""
    settings = json.loads(settings_text)
    with _own_standard_output() as out:

        def answer(value: dict[str, Any]) -> None:
            out.write(json.dumps(value) + "\n")
            out.flush()

        missing = _missing(settings)
        if missing is not None:
            answer({"missing": missing})
            return
        compiler = Compiler(settings)
        answer({"ready": True})
        for line in sys.stdin:
            try:
                result = compiler.compile(line.rstrip("\n"))
            except Exception as error:
                # Whatever the compiler raises is what it has to say about the module.
                result = {"error": str(error)}
            answer(result)


if __name__ == "__main__":
    main(sys.argv[1])
