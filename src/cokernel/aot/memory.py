"""How much of each memory the kernels of a function ask for."""

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Callable
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
      asked: bytes of its scratch there, without the compiler's padding.
      budget: bytes that the chip has of it, None where that is not known.
      largest: the largest piece, by its name in the program and with its type.
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
        size = size_in_bytes(var.aval)
        asked[memory] += size
        pieces[memory] = max(pieces.get(memory, (0, "")), (size, _described(name, var.aval)))
    scoped: Counter[str] = Counter()
    # Cores of one mesh never share their own memory with those of another, except on a GPU: there,
    # all that several programs allocate is allocated at once.
    combine = operator.add if len(meshes) > 1 and is_gpu_mesh(meshes[0]) else max
    for mesh, program in zip(meshes, programs, strict=True):
        for memory, size in _scoped(program, (mesh,), combine).items():
            scoped[memory] = combine(scoped[memory], size)
    return [
        MemoryUse(
            kernel=kernel_name(eqn),
            memory=memory,
            asked=size,
            budget=budget.get(memory),
            largest=pieces.get(memory, (0, "allocated by run_scoped"))[1],
        )
        for memory, size in sorted((asked + scoped).items())
    ]


def _scoped(
    jaxpr: Any, meshes: tuple[Any, ...], combine: Callable[[int, int], int]
) -> Counter[str]:
    """Returns the most that `run_scoped` has allocated at any time, by memory; `combine` says what
    two allocations need of which one ends before the other begins."""
    most: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        here: Counter[str] = Counter()
        for inner in _jax.jaxprs_in_params(eqn.params):
            for memory, size in _scoped(inner, meshes, combine).items():
                here[memory] = max(here[memory], size)
            if eqn.primitive is _jax.pallas_primitives.run_scoped_p:
                for var in inner.invars:
                    here[_memory_of(var.aval, meshes)] += size_in_bytes(var.aval)
        for memory, size in here.items():
            most[memory] = combine(most[memory], size)
    return Counter({memory: size for memory, size in most.items() if size})


def _described(name: str, aval: Any) -> str:
    inner = aval.inner_aval.str_short() if hasattr(aval, "inner_aval") else aval.str_short()
    return f"{name or 'scratch'}: {inner}"


def size_in_bytes(aval: Any) -> int:
    """Returns the bytes of what a Ref holds; semaphores count as nothing."""
    inner = getattr(aval, "inner_aval", aval)
    dtype = getattr(inner, "dtype", None)
    if not isinstance(dtype, np.dtype):
        return 0
    bits = getattr(dtype, "itemsize", 0) * 8
    return math.prod(inner.shape) * bits // 8


def _memory_of(aval: Any, meshes: tuple[Any, ...]) -> str:
    space = getattr(aval, "memory_space", None)
    owners = meshes
    if isinstance(space, _jax.CoreMemorySpace):
        space, owners = space.memory_space, (space.mesh,)
    names = _jax.TpuMemorySpace
    match space:
        case names.HBM | None:
            return "HBM"
        case names.VMEM_SHARED:
            return "shared memory of a SparseCore"
        case names.SEMAPHORE:
            return "semaphores"
        case _ if any(map(is_gpu_mesh, owners)):
            names_on_gpu = {"SMEM": "shared memory of a block", "GMEM": "HBM"}
            return names_on_gpu.get(space.name, space.name)
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
