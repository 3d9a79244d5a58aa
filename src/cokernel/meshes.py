"""Meshes of cores: our own for plain CPU cores, which meshes fit together, and chips to pretend.

JAX builds its TPU meshes from what it knows of the TPU it runs on. `target` lets it know a TPU
where there is none.
"""

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cokernel import _jax

# Warpgroups of 128 CUDA threads, of which a block has at most 1,024.
GPU_THREADS = 8

# The chip that SparseCore meshes and kernels are made for, per thread with a default for all
# threads. It is part of the key of JAX's caches, so nothing traced for one chip serves another.
_target_state: Any = _jax.config_ext.Config(
    "cokernel_target", None, include_in_jit_key=True, include_in_trace_context=True
)


def current_target() -> str | None:
    """Returns the name of the chip that is pretended in this thread, or None."""
    return _target_state.value


def chip_names() -> list[str]:
    """Returns the names that `target` understands, as in ["v2", ..., "v6e", "7x", ...]."""
    return [chip.value for chip in _jax.ChipVersion]


def _chip(name: str) -> Any:
    if not isinstance(name, str):
        raise TypeError(f"a target is named by a string such as 'v6e', got {name!r}")
    # "TPU v6e", "tpu7x", "v7x" and "v6 lite" are all names that JAX, its users or the cloud use.
    plain = name.lower().replace("tpu", "").replace(" lite", "e").strip(" -_")
    aliases = {"v7": "7", "v7x": "7x", "v8i": "8i", "v8t": "8t", "v4e": "v4i", "v5": "v5p"}
    plain = aliases.get(plain, plain)
    try:
        return _jax.ChipVersion(plain)
    except ValueError:
        raise ValueError(
            f"there is no target {name!r}; known are {', '.join(chip_names())}"
        ) from None


def chip_info(name: str) -> Any:
    """Returns JAX's description (`TpuInfo`) of the chip called `name`.

    A chip whose two TensorCores can act as one device is described that way.
    """
    chip = _chip(name)
    return _jax.get_tpu_info_for_chip(chip, 2 if chip.supports_megacore else 1)


class _TargetRegistry(Mapping[str, Callable[[], Any]]):
    """JAX's table of chips, in which any device is the target while one is active."""

    def __init__(self, original: Mapping[str, Callable[[], Any]]):
        self._original = original

    def __getitem__(self, device_kind: str) -> Callable[[], Any]:
        name = current_target()
        if name is None:
            return self._original[device_kind]
        return lambda: chip_info(name)

    def __contains__(self, device_kind: object) -> bool:
        return current_target() is not None or device_kind in self._original

    def __iter__(self) -> Iterator[str]:
        return iter(self._original)

    def __len__(self) -> int:
        return len(self._original)


def _num_cores_of_device(device: Any) -> int:
    name = current_target()
    if name is None or device.platform == "tpu":
        return _jax.jaxlib_extension.Device.__getattr__(device, "num_cores")
    return chip_info(name).num_cores


class _Hooks:
    """The two places in which JAX asks for chip data, redirected while any target is active.

    They are redirected for the whole process, but answer as before in threads without a target.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._users = 0
        self._original_registry: Any = None

    def acquire(self) -> None:
        with self._lock:
            if self._users == 0:
                self._original_registry = _jax.tpu_info.registry
                replacement: Any = _TargetRegistry(self._original_registry)
                _jax.tpu_info.registry = replacement
                _jax.jaxlib_extension.Device.num_cores = property(_num_cores_of_device)
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                _jax.tpu_info.registry = self._original_registry
                del _jax.jaxlib_extension.Device.num_cores


_hooks = _Hooks()


class target(contextlib.ContextDecorator):
    """Pretends, within a `with` block, that the machine has a TPU of this kind.

    Inside, SparseCore and TensorCore meshes can be built with the chip's own numbers of cores,
    `pltpu.get_tpu_info()` and `plsc.get_sparse_core_info()` describe the chip, and kernels can be
    traced. A kernel made inside remembers the chip and may be called outside. The block holds for
    the calling thread, and may be nested. Where JAX runs on a real TPU, it describes itself.

      with cokernel.target("v6e"):
          mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    Args:
      name: the chip, such as "v5p", "v6e" or "tpu7x"; `cokernel.meshes.chip_names()` lists all.

    Raises:
      ValueError: if JAX knows no such chip.
    """

    def __init__(self, name: str):
        self.name = _chip(name).value
        # A stack, so that one object can be entered again while it is active.
        self._previous: list[Any] = []

    def _recreate_cm(self) -> "target":
        return target(self.name)

    def __enter__(self) -> "target":
        _hooks.acquire()
        self._previous.append(_target_state.swap_local(self.name))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _target_state.set_local(self._previous.pop())
        _hooks.release()

    def __repr__(self) -> str:
        return f"target({self.name!r})"


def target_or_nothing(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Returns `target(name)`, or a context that changes nothing if `name` is None."""
    return contextlib.nullcontext() if name is None else target(name)


_setting_lock = threading.Lock()


def set_target(name: str | None) -> None:
    """Sets the chip that all threads pretend to have where no `with target(...)` says otherwise.

    Args:
      name: the chip, as for `target`, or None to end the pretence.
    """
    new = None if name is None else _chip(name).value
    with _setting_lock:
        old = _target_state.get_global()
        if new is not None:
            _hooks.acquire()
        _target_state.set_global(new)
        if old is not None:
            _hooks.release()


@dataclasses.dataclass(frozen=True)
class CpuCoreType:
    """The core type of a CoreMesh; meshes with different axis names have different core types."""

    axis_names: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name that can stand in an identifier."""
        return "_".join(("cpu_core", *self.axis_names))

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, init=False)
class CoreMesh(_jax.Mesh):
    """A mesh of plain CPU cores, with named axes.

    `CoreMesh(core=4)` has four cores and `CoreMesh(row=2, column=3)` six. Each core has private
    memory (`cokernel.private`) and all cores of the mesh share some (`cokernel.shared`). A kernel
    may have several, if their axes have different names.

    Args:
      **axes: the size of each axis, at least 1, under its name; the last axis varies fastest.
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, **axes: int):
        if not axes:
            raise ValueError("a CoreMesh needs at least one axis, as in CoreMesh(core=4)")
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"axis {name!r} of a CoreMesh needs an int as its size: {size!r}")
            if size < 1:
                raise ValueError(f"axis {name!r} of a CoreMesh needs at least one core, got {size}")
        object.__setattr__(self, "axes", tuple(axes.items()))

    def __repr__(self) -> str:
        return f"CoreMesh({', '.join(f'{name}={size}' for name, size in self.axes)})"

    @property
    def shape(self) -> collections.OrderedDict[object, int]:
        """The size of each axis by its name."""
        return collections.OrderedDict(self.axes)

    @property
    def size(self) -> int:
        """The number of cores."""
        return mesh_size(self)

    @property
    def core_type(self) -> CpuCoreType:
        """What kind of core this is."""
        return CpuCoreType(tuple(name for name, _ in self.axes))

    @property
    def default_memory_space(self) -> Any:
        """Where the Refs of inputs and outputs live: in memory that all cores reach."""
        return _jax.TpuMemorySpace.HBM

    @property
    def supported_memory_spaces(self) -> Sequence[Any]:
        """The memory spaces that can be tied to this mesh with `space @ mesh`."""
        space = _jax.TpuMemorySpace
        return [space.VMEM, space.SMEM, space.VMEM_SHARED, space.SEMAPHORE]

    def discharges_effect(self, effect: Any) -> bool:
        """Returns whether the mesh itself accounts for `effect`; it does for none."""
        del effect
        return False

    def check_is_compatible_with(self, other_mesh: Any) -> None:
        """Raises ValueError if a kernel cannot have programs on both meshes."""
        check_compatible([self, other_mesh])

    @contextlib.contextmanager
    def tracing_context(self) -> Iterator[None]:
        """What must hold while a program of this mesh is traced: nothing."""
        yield


def private(shape: Sequence[int], dtype: Any) -> Any:
    """Describes scratch memory of which every core has its own.

    In a kernel of several programs, tie it to the mesh that uses it: `private(...) @ mesh`.
    """
    return _jax.TpuMemorySpace.VMEM(tuple(shape), dtype)


def shared(shape: Sequence[int], dtype: Any) -> Any:
    """Describes scratch memory that the cores of one CoreMesh, or of one SparseCore, share.

    In a kernel of several programs, tie it to the mesh that uses it: `shared(...) @ mesh`.
    """
    return _jax.TpuMemorySpace.VMEM_SHARED(tuple(shape), dtype)


def mesh_size(mesh: Any) -> int:
    """Returns the number of cores of any mesh."""
    size = 1
    for axis_size in mesh.shape.values():
        size *= axis_size
    return size


def shared_memory_group(mesh: Any) -> object:
    """Returns a key that is equal for meshes whose cores share memory, or None if none is shared.

    The scalar and the vector subcores of a SparseCore share their memory; TensorCores share none.
    """
    match mesh:
        case _jax.ScalarSubcoreMesh() | _jax.VectorSubcoreMesh():
            return "SparseCore"
        case CoreMesh():
            return mesh
        case _:
            return None


def _sparse_core_axis(mesh: Any) -> tuple[str, int] | None:
    match mesh:
        case _jax.ScalarSubcoreMesh():
            return mesh.axis_name, mesh.num_cores
        case _jax.VectorSubcoreMesh():
            return mesh.core_axis_name, mesh.num_cores
        case _:
            return None


def check_compatible(meshes: Sequence[Any]) -> None:
    """Checks that one kernel can have a program on each of these meshes.

    There may be one mesh of each core type. Scalar and vector subcores belong to the same
    SparseCores, so their meshes have the same core axis, by name and size. Apart from that, no two
    meshes have an axis name in common.

    Raises:
      ValueError: if the rules are broken; it names both meshes and says what to change.
    """
    for mesh in meshes:
        _check_alone(mesh)
    for first, second in itertools.combinations(meshes, 2):
        _check_pair(first, second)
    if len(meshes) > 1 and all(map(is_gpu_mesh, meshes)):
        _check_gpu_threads(meshes)


def _check_alone(mesh: Any) -> None:
    for name, size in mesh.shape.items():
        if size < 1:
            raise ValueError(f"axis {name!r} of {mesh} has {size} cores; it needs at least one")
    if isinstance(mesh, _jax.VectorSubcoreMesh) and len(mesh.shape) != 2:
        raise ValueError(
            f"the axes of {mesh} need two different names: rename core_axis_name or "
            "subcore_axis_name"
        )


def is_gpu_mesh(mesh: Any) -> bool:
    """Returns whether a mesh is one of `jax.experimental.pallas.mosaic_gpu`."""
    return getattr(mesh, "core_type", None) == "gpu"


def _check_gpu_threads(meshes: Sequence[Any]) -> None:
    threads = [mesh.num_threads or 1 for mesh in meshes]
    if sum(threads) > GPU_THREADS:
        raise ValueError(
            f"the programs of this kernel have {' + '.join(map(str, threads))} = {sum(threads)} "
            f"threads, but a block of a GPU has at most {GPU_THREADS} (each is a warpgroup): give "
            "the meshes fewer"
        )


def _check_gpu_pair(first: Any, second: Any) -> None:
    for name in ("grid", "grid_names", "cluster", "cluster_names"):
        if getattr(first, name) != getattr(second, name):
            raise ValueError(
                f"programs of one kernel on a GPU differ only in their threads, but {first} and "
                f"{second} have different {name}: {getattr(first, name)} and "
                f"{getattr(second, name)}"
            )
    if first.thread_name is not None and first.thread_name == second.thread_name:
        raise ValueError(
            f"{first} and {second} both have a thread axis named {first.thread_name!r}: rename it "
            "in one of them"
        )


def _check_pair(first: Any, second: Any) -> None:
    if is_gpu_mesh(first) and is_gpu_mesh(second):
        _check_gpu_pair(first, second)
        return
    if is_gpu_mesh(first) or is_gpu_mesh(second):
        raise ValueError(
            f"{first} and {second} cannot be in one kernel, since only one of them is for a GPU: "
            "put the programs into two kernels"
        )
    if first.core_type == second.core_type:
        if isinstance(first, CoreMesh):
            advice = "give their axes different names"
        else:
            advice = "join the two programs into one, on one mesh"
        raise ValueError(
            f"a kernel can have only one mesh per core type, and {first} and {second} both have "
            f"{first.core_type}: {advice}"
        )
    first_core_axis, second_core_axis = _sparse_core_axis(first), _sparse_core_axis(second)
    allowed_in_both: set[object] = set()
    if first_core_axis is not None and second_core_axis is not None:
        if first_core_axis != second_core_axis:
            raise ValueError(
                f"{first} and {second} stand for the same SparseCores, so both need the same name "
                f"and size for the core axis: one has {first_core_axis[0]!r} of size "
                f"{first_core_axis[1]}, the other {second_core_axis[0]!r} of size "
                f"{second_core_axis[1]}"
            )
        allowed_in_both = {first_core_axis[0]}
    common = [name for name in first.shape if name in second.shape and name not in allowed_in_both]
    if common:
        raise ValueError(
            f"{first} and {second} both have an axis named {common[0]!r}: rename it in one of them"
        )
