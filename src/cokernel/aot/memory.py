"""How much of each memory the kernels of a function ask for."""

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np

from cokernel import _jax, primitive
from cokernel.meshes import is_gpu_mesh


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """What one kernel asks of one memory.

    Attributes:
      kernel: the kernel's name.
      memory: which memory, as in "VMEM of a vector subcore".
      asked: bytes of its scratch there, without the compiler's padding; of memory for semaphores,
        how many semaphores.
      budget: what the chip has of it, None where that is not known.
      largest: the largest piece, by its name in the program, or where it is allocated, and its
        type.
    """

    kernel: str
    memory: str
    asked: int
    budget: int | None
    largest: str

    @property
    def exceeds(self) -> bool:
        """Whether more is asked for than there is."""
        return self.budget is not None and self.asked > self.budget


def kernels(jaxpr: Any) -> list[Any]:
    """Returns the equations that launch kernels, ours and those of `pl.kernel`."""
    return [eqn for eqn in primitive.all_equations(jaxpr) if is_kernel(eqn)]


def is_kernel(eqn: Any) -> bool:
    """Returns whether an equation launches a kernel of programs."""
    return eqn.primitive in (primitive.mpmd_map_p, _jax.stock_mpmd_map_p)


def kernel_name(eqn: Any) -> str:
    """Returns the name of the kernel that an equation launches."""
    names = [jaxpr.debug_info.func_name for jaxpr in eqn.params["jaxprs"]]
    return eqn.params["name"] or "_and_".join(names)


def memory_uses(eqn: Any, budget: dict[str, int]) -> list[MemoryUse]:
    """Returns what the kernel that `eqn` launches asks of each memory."""
    programs, meshes = eqn.params["jaxprs"], eqn.params["meshes"]
    asked: Counter[str] = Counter()
    pieces: dict[str, tuple[int, str]] = {}
    num_others = len(eqn.invars) + len(eqn.params["out_avals"])
    names = programs[0].debug_info.arg_names or ("",) * len(programs[0].invars)
    scratch = zip(programs[0].invars[num_others:], names[num_others:], strict=True)
    for var, name in scratch:
        memory = _memory_of(var.aval, meshes)
        size = size_of(var.aval)
        asked[memory] += size
        _keep_larger(pieces, memory, size, _described(name, var.aval))
    scoped: Counter[str] = Counter()
    # Cores of one mesh never share their own memory with those of another, except on a GPU: there,
    # all that several programs allocate is allocated at once.
    together = len(meshes) > 1 and is_gpu_mesh(meshes[0])
    for mesh, program in zip(meshes, programs, strict=True):
        scope = _Scope((mesh,), together, pieces)
        for memory, size in scope.most(program).items():
            scoped[memory] = scope.combined(memory, scoped[memory], size)
    total = asked + scoped
    vectors = [mesh for mesh in meshes if isinstance(mesh, _jax.VectorSubcoreMesh)]
    if total[_SHARED] and vectors:
        total[_SHARED_AND_OWN] = (
            total[_SHARED] + vectors[0].num_subcores * total["VMEM of a vector subcore"]
        )
        pieces[_SHARED_AND_OWN] = pieces[_SHARED]
    return [
        MemoryUse(
            kernel=kernel_name(eqn),
            memory=memory,
            asked=size,
            budget=budget.get(memory),
            largest=pieces[memory][1],
        )
        for memory, size in sorted(total.items())
    ]


_SHARED = "shared memory of a SparseCore"
# They are parts of one memory, of which vector subcores have each their own share.
_SHARED_AND_OWN = "shared memory and VMEM of a SparseCore"
_REGISTERS = "registers of a warpgroup"


def _keep_larger(
    pieces: dict[str, tuple[int, str]], memory: str, size: int, described: str
) -> None:
    if memory not in pieces or size > pieces[memory][0]:
        pieces[memory] = (size, described)


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Adds up what `run_scoped` allocates in a program.

    Attributes:
      meshes: that of the program.
      together: whether all that programs allocate is allocated at once.
      pieces: the largest pieces by memory, to which those of the program are added.
    """

    meshes: tuple[Any, ...]
    together: bool
    pieces: dict[str, tuple[int, str]]

    def combined(self, memory: str, first: int, second: int) -> int:
        """Returns what two allocations need of which one ends before the other begins."""
        # Registers are each program's own.
        return first + second if self.together and memory != _REGISTERS else max(first, second)

    def most(self, jaxpr: Any) -> Counter[str]:
        """Returns the most that is allocated at any time, by memory."""
        most: Counter[str] = Counter()
        for eqn in jaxpr.eqns:
            here: Counter[str] = Counter()
            for inner in _jax.jaxprs_in_params(eqn.params):
                for memory, size in self.most(inner).items():
                    # Which branch is taken is not known, and all of them are allocated together.
                    here[memory] = self.combined(memory, here[memory], size)
                if eqn.primitive is _jax.pallas_primitives.run_scoped_p:
                    self._add_scope(eqn, inner, here)
            for memory, size in here.items():
                most[memory] = self.combined(memory, most[memory], size)
        return most

    def _add_scope(self, eqn: Any, inner: Any, here: Counter[str]) -> None:
        frame = _jax.user_frame(eqn.source_info.traceback)
        at = "" if frame is None else f" at {frame.file_name}:{frame.start_line}"
        for var in inner.invars:
            memory, size = _memory_of(var.aval, self.meshes), size_of(var.aval)
            here[memory] += size
            _keep_larger(self.pieces, memory, size, _described(f"run_scoped{at}", var.aval))


def _described(name: str, aval: Any) -> str:
    inner = aval.inner_aval.str_short() if hasattr(aval, "inner_aval") else aval.str_short()
    return f"{name or 'scratch'}: {inner}"


# The PTX manual: an mbarrier object has 8 bytes.
_BARRIER_BYTES = 8


def size_of(aval: Any) -> int:
    """Returns the bytes of what a Ref holds, or how many semaphores it has."""
    inner = getattr(aval, "inner_aval", aval)
    count = math.prod(inner.shape)
    if isinstance(inner.dtype, np.dtype):
        return -(-count * _jax.itemsize_bits(inner.dtype) // 8)
    if isinstance(inner.dtype, _jax.AbstractSemaphoreTy):
        return count
    return count * _BARRIER_BYTES


def _memory_of(aval: Any, meshes: tuple[Any, ...]) -> str:
    space = getattr(aval, "memory_space", None)
    owners = meshes
    if isinstance(space, _jax.CoreMemorySpace):
        space, owners = space.memory_space, (space.mesh,)
    names = _jax.TpuMemorySpace
    dtype = getattr(getattr(aval, "inner_aval", aval), "dtype", None)
    match space:
        case _ if any(map(is_gpu_mesh, owners)):
            if isinstance(dtype, _jax.AbstractSemaphoreTy):
                return "semaphores"
            names_on_gpu = {"SMEM": "shared memory of a block", "GMEM": "HBM", "REGS": _REGISTERS}
            name = getattr(space, "name", "HBM")
            return names_on_gpu.get(name, name)
        case names.HBM | None:
            return "HBM"
        case names.VMEM_SHARED:
            return _SHARED
        case names.SEMAPHORE:
            return f"semaphores of {_owner(owners)}"
        case _:
            return f"{getattr(space, 'name', space)} of {_owner(owners)}"


def _owner(owners: tuple[Any, ...]) -> str:
    match owners[0]:
        case _jax.TensorCoreMesh():
            return "a TensorCore"
        case _jax.VectorSubcoreMesh():
            return "a vector subcore"
        case _jax.ScalarSubcoreMesh():
            return "a scalar subcore"
        case mesh:
            return f"a core of {mesh}"
