"""A whole kernel: its operands, its scratch and their places in memory, and the module its programs are compiled into."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.context import Context, Program
from cokernel.compiler.dtypes import i32, i64, pointer
from cokernel.compiler.function import FunctionBuilder, Index
from cokernel.compiler.memory import ALIGNMENT, Arena, round_up
from cokernel.compiler.ops import load_rules
from cokernel.compiler.program import argument_names, inner_jaxprs, lower_jaxpr, may_suspend
from cokernel.compiler.refs import Place, RefValue, read, resolve
from cokernel.compiler.sites import SiteTable


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """LLVM IR of all programs, and what the runtime must know to launch them. All of it is plain data but `callbacks`."""

    ir: str
    spec: dict[str, Any]
    sites: list[dict[str, Any]]
    # Where each semaphore and Ref lies, for reports that are given an address: see `Kernel.describe_memory`.
    memory: dict[str, Any]
    callbacks: list[dict[str, Any]]


def space_of(aval: Any) -> tuple[Any, Any]:
    """The memory space of an aval and the mesh it is tied to, if any."""
    space = getattr(aval, "memory_space", None)
    if isinstance(space, _jax.CoreMemorySpace):
        return space.memory_space, space.mesh
    return space, None


class Kernel:
    """Plans the memory of a kernel and compiles its programs into one LLVM module."""

    def __init__(
        self,
        name: str,
        jaxprs: Sequence[Any],
        meshes: Sequence[Any],
        external_meshes: Sequence[Any],
        *,
        operand_count: int,
        result_count: int,
        outer_axes: Sequence[Any],
        outer_sizes: Sequence[int],
        bounds_checks: bool,
        offsets: dict[str, int],
    ):
        self.name = name
        self.jaxprs = tuple(jaxprs)
        self.meshes = tuple(meshes)
        self.external_meshes = tuple(external_meshes)
        self.bounds_checks = bounds_checks
        self.offsets = offsets
        self.operand_count = operand_count
        self.result_count = result_count
        # Axes of a shard_map around the kernel; their indices are passed as operands behind the user's own.
        self.outer_axes = list(outer_axes)
        self.outer_sizes = list(outer_sizes)
        self.sites = SiteTable()
        self.module = ir.Module(name)
        self.callbacks: list[dict[str, Any]] = []
        self.shared_arena = Arena()
        self.device_arena = Arena()
        # Allocations that live as long as the kernel.
        self._permanent: list[Any] = []
        self._scoped_semaphores: list[int] = []
        self._barrier_semaphores: dict[tuple[int, Any], RefValue] = {}
        self.instance_operands: list[dict[str, Any]] = []
        self.program_names = [
            (jaxpr.debug_info.func_name if jaxpr.debug_info is not None else None)
            or f"program{number}"
            for number, jaxpr in enumerate(jaxprs)
        ]
        self.has_remote_access = any(map(_reaches_other_cores, jaxprs))
        self.programs = [self._plan_program(number) for number in range(len(self.jaxprs))]
        self.refs = self._plan_refs()

    # Planning.

    def _plan_program(self, number: int) -> Program:
        jaxpr, mesh = self.jaxprs[number], self.meshes[number]
        first = sum(math.prod(other.shape.values()) for other in self.meshes[:number])
        return Program(
            name=self.program_names[number],
            index=number,
            mesh=mesh,
            first_core=first,
            axis_sizes=dict(mesh.shape),
            sites=self.sites,
            arena=Arena(),
            can_suspend=may_suspend(jaxpr),
        )

    def _plan_refs(self) -> list[list[RefValue]]:
        """The RefValues of each program's parameters. Programs share the Refs themselves but each has its own names."""
        variables = self.jaxprs[0].invars
        names = [argument_names(jaxpr, len(variables), "argument") for jaxpr in self.jaxprs]
        scoped = [_semaphore_count(jaxpr) for jaxpr in self.jaxprs]
        scratch_start = self.operand_count + self.result_count
        # Semaphores come first in each private block, so that one memset clears them: the scratch ones, then the scoped ones.
        scratch_semaphores = [0] * len(self.jaxprs)
        for variable in variables[scratch_start:]:
            if dtypes.is_semaphore(variable.aval.dtype) and space_of(variable.aval)[0] is not None:
                scratch_semaphores[self._owner(variable.aval)] += variable.aval.size
        next_semaphore = [0] * len(self.jaxprs)
        self._scoped_semaphores = [count * dtypes.SEMAPHORE_BYTES for count in scratch_semaphores]
        self._semaphore_bytes = [
            (scratch + inner) * dtypes.SEMAPHORE_BYTES
            for scratch, inner in zip(scratch_semaphores, scoped, strict=True)
        ]
        for program, size in zip(self.programs, self._semaphore_bytes, strict=True):
            if size:
                self._permanent.append(program.arena.allocate(size))
        shared: list[RefValue] = []
        for position, variable in enumerate(variables):
            if position < scratch_start:
                shared.append(self._plan_operand(position, variable.aval, names[0][position]))
            else:
                shared.append(self._plan_scratch(variable.aval, names[0][position], next_semaphore))
        # The same RefValue object stands for the same memory in all programs; a program's own names only matter in reports.
        return [
            [
                ref if name == ref.name else dataclasses.replace(ref, name=name)
                for ref, name in zip(shared, program_names, strict=True)
            ]
            for program_names in names
        ]

    def _owner(self, aval: Any) -> int:
        """The number of the program whose cores own instances of a Ref."""
        _, mesh = space_of(aval)
        if mesh is None:
            if len(self.meshes) == 1:
                return 0
            raise ValueError(
                f"kernel {self.name!r}: a Ref in {aval.memory_space} belongs to no mesh; with several meshes write "
                "`memory_space @ mesh`"
            )
        return self.meshes.index(mesh)

    def _plan_operand(self, position: int, aval: Any, name: str) -> RefValue:
        # Between the user's operands and the results stand the indices of outer axes.
        buffer = position if position < self.operand_count else position + len(self.outer_axes)
        space, mesh = space_of(aval)
        is_semaphore = dtypes.is_semaphore(aval.dtype)
        per_core = is_semaphore or (mesh is not None and space in _PRIVATE_SPACES)
        if not per_core:
            return RefValue(name, tuple(aval.shape), aval.dtype, str(space), Place.OPERAND, buffer)
        owner_mesh = mesh if mesh is not None else self.meshes[0]
        program = self.meshes.index(owner_mesh) if owner_mesh in self.meshes else None
        ref = RefValue(
            name,
            tuple(aval.shape),
            aval.dtype,
            str(space),
            Place.INSTANCES,
            buffer,
            program=program,
            mesh=owner_mesh,
        )
        self.instance_operands.append(
            {
                "buffer": buffer,
                "is_output": position >= self.operand_count,
                "bytes": ref.nbytes,
                "count": math.prod(owner_mesh.shape.values()),
            }
        )
        return ref

    def _plan_scratch(self, aval: Any, name: str, next_semaphore: list[int]) -> RefValue:
        if not isinstance(aval, _jax.AbstractRef):
            raise NotImplementedError(
                f"kernel {self.name!r}: scratch {name!r} of type {aval} is not a Ref"
            )
        space, _ = space_of(aval)
        size = aval.size * dtypes.itemsize(aval.dtype)
        if dtypes.is_semaphore(aval.dtype):
            program = self._owner(aval)
            offset = next_semaphore[program] * dtypes.SEMAPHORE_BYTES
            next_semaphore[program] += aval.size
            return self._ref(aval, name, Place.PRIVATE, offset, program)
        if space is _jax.TpuMemorySpace.VMEM_SHARED:
            return self._ref(aval, name, Place.SHARED, self._keep(self.shared_arena, size), None)
        if space in (_jax.TpuMemorySpace.HBM, _jax.PallasMemorySpace.ANY):
            return self._ref(aval, name, Place.DEVICE, self._keep(self.device_arena, size), None)
        program = self._owner(aval)
        offset = self._keep(self.programs[program].arena, size)
        return self._ref(aval, name, Place.PRIVATE, offset, program)

    def _ref(
        self,
        aval: Any,
        name: str,
        place: Place,
        offset: int,
        program: int | None,
        owner: Any = None,
    ) -> RefValue:
        mesh = self.meshes[program] if program is not None else None
        return RefValue(
            name,
            tuple(aval.shape),
            aval.dtype,
            str(space_of(aval)[0]),
            place,
            offset,
            program=program,
            mesh=mesh,
            owner=owner,
        )

    def _keep(self, arena: Arena, size: int) -> int:
        allocation = arena.allocate(size)
        self._permanent.append(allocation)
        return allocation.offset

    def allocate_scoped(self, context: Context, aval: Any, name: str) -> RefValue:
        """Memory for a Ref that a program allocates while it runs: private memory is used again after the scope."""
        program = context.program.index
        size = aval.size * dtypes.itemsize(aval.dtype)
        space, mesh = space_of(aval)
        if mesh is not None and mesh != context.program.mesh:
            raise ValueError(
                f"{context.describe()}: {name!r} is allocated for another mesh than the program's own"
            )
        if dtypes.is_semaphore(aval.dtype):
            offset = self._scoped_semaphores[program]
            self._scoped_semaphores[program] += size
            ref = self._ref(aval, name, Place.PRIVATE, offset, program)
            self.describe_semaphores.setdefault(program, []).append(
                [offset, size, name, list(aval.shape)]
            )
            if not self.has_remote_access:
                # The scope may be entered again with a count left over. Where other cores reach semaphores, a signal may come
                # before the scope is entered, so there the count is kept, as the hardware does.
                fill_zero(context, ref.address(context), size)
            return ref
        if space is _jax.TpuMemorySpace.VMEM_SHARED:
            return self._ref(aval, name, Place.SHARED, self._keep(self.shared_arena, size), None)
        owner = context.program.arena.allocate(size)
        return self._ref(aval, name, Place.PRIVATE, owner.offset, program, owner)

    def barrier_semaphore(self, program: int, tag: Any, aval: Any) -> RefValue:
        """The semaphore that `get_barrier_semaphore(tag)` means in a program: one per core, for the whole launch."""
        known = self._barrier_semaphores.get((program, tag))
        if known is None:
            offset = self._scoped_semaphores[program]
            self._scoped_semaphores[program] += dtypes.SEMAPHORE_BYTES
            known = self._ref(aval, "barrier_semaphore", Place.PRIVATE, offset, program)
            self._barrier_semaphores[program, tag] = known
            self.describe_semaphores.setdefault(program, []).append(
                [offset, dtypes.SEMAPHORE_BYTES, known.name, []]
            )
        return known

    def barrier_semaphore_of(self, program: int, ref: RefValue, device_id: Any) -> RefValue:
        """The barrier semaphore that a signal means: that of another mesh if `device_id` names an axis which only that has.
        Any other semaphore stays what it is."""
        tags = [tag for (_, tag), known in self._barrier_semaphores.items() if known is ref]
        if not tags or not isinstance(device_id, dict):
            return ref
        named = {axis for key in device_id for axis in (key if isinstance(key, tuple) else (key,))}
        foreign = named - {*self.meshes[program].shape, *self.outer_axes}
        for other, (mesh, jaxpr) in enumerate(zip(self.meshes, self.jaxprs, strict=True)):
            if foreign and foreign <= {*mesh.shape}:
                if tags[0] not in _barrier_tags(jaxpr):
                    raise ValueError(
                        f"kernel {self.name!r}: program {self.program_names[program]!r} signals the barrier semaphore of "
                        f"{mesh}, but program {self.program_names[other]!r} there never calls get_barrier_semaphore"
                    )
                aval = _jax.AbstractRef(
                    _jax.ShapedArray((), ref.dtype), _jax.TpuMemorySpace.SEMAPHORE
                )
                return self.barrier_semaphore(other, tags[0], aval)
        return ref

    # Code.

    def compile(self) -> CompiledKernel:
        """Emits all programs and returns their IR with the plan of memory."""
        load_rules()
        for program, jaxpr, refs in zip(self.programs, self.jaxprs, self.refs, strict=True):
            function = FunctionBuilder(
                self.module,
                self.entry_name(program),
                is_program=True,
                can_suspend=program.can_suspend,
                offsets=self.offsets,
            )
            context = Context(self, program, function)
            # A program receives what it closes over, other than Refs, by value.
            arguments = [
                ref
                if isinstance(var.aval, _jax.AbstractRef)
                else read(context, resolve(context, ref, (), "read"))
                for var, ref in zip(jaxpr.invars, refs, strict=True)
            ]
            lower_jaxpr(context, jaxpr, arguments)
            function.finish()
        return CompiledKernel(
            ir=str(self.module),
            spec=self._spec(),
            sites=self.sites.to_list(),
            memory=self.describe_memory(),
            callbacks=self.callbacks,
        )

    def entry_name(self, program: Program) -> str:
        """The symbol of a program in the module."""
        return f"cokernel_program_{program.index}"

    def _spec(self) -> dict[str, Any]:
        groups = max((_group_count(mesh) for mesh in self.meshes), default=1)
        return {
            "name": self.name,
            "programs": [
                {
                    "name": program.name,
                    "entry": self.entry_name(program),
                    "is_coroutine": program.can_suspend,
                    "shape": list(program.mesh.shape.values()),
                    "group_axis": _group_axis(program.mesh),
                    "private_bytes": program.arena.size,
                    "semaphore_bytes": size,
                    "uses_barrier": _uses_barrier(jaxpr),
                }
                for program, jaxpr, size in zip(
                    self.programs, self.jaxprs, self._semaphore_bytes, strict=True
                )
            ],
            "group_count": groups if self.shared_arena.size else 0,
            "shared_bytes": self.shared_arena.size,
            "device_bytes": self.device_arena.size,
            "instance_operands": self.instance_operands,
        }

    def describe_memory(self) -> dict[str, Any]:
        """Which semaphore lies where, as plain data for reports.

        "semaphores": for each program those in the private block of its cores, as [offset, bytes,
        name, shape]. "instances": for each buffer that holds one instance per core of a mesh its
        "name", "shape", "bytes" (of one instance), "program" (None if the mesh has none here) and
        the "axes" and "sizes" of the mesh. "axes": the axes of each program's mesh.
        """
        semaphores: dict[str, list[list[Any]]] = {}
        for program in self.programs:
            entries = [
                [ref.offset, ref.nbytes, ref.name, list(ref.shape)]
                for ref in self.refs[program.index]
                if ref.place is Place.PRIVATE
                and ref.program == program.index
                and dtypes.is_semaphore(ref.dtype)
            ]
            entries += self.describe_semaphores.get(program.index, [])
            semaphores[str(program.index)] = entries
        instances = {
            str(ref.offset): {
                "name": ref.name,
                "shape": list(ref.shape),
                "bytes": ref.nbytes,
                "program": ref.program,
                "axes": [str(axis) for axis in ref.mesh.shape],
                "sizes": list(ref.mesh.shape.values()),
            }
            for ref in self.refs[0]
            if ref.place is Place.INSTANCES
        }
        return {
            "semaphores": semaphores,
            "instances": instances,
            "axes": [[str(axis) for axis in mesh.shape] for mesh in self.meshes],
        }

    @property
    def describe_semaphores(self) -> dict[int, list[list[Any]]]:
        """Semaphores allocated in scopes, by program, as `describe_memory` gives them."""
        return self.__dict__.setdefault("_scoped_names", {})

    # What rules ask.

    def add_callback(self, function: Callable[..., Any], operands: int, results: int) -> int:
        """Registers a Python function that compiled code calls; returns its number."""
        self.callbacks.append({"function": function, "operands": operands, "results": results})
        return len(self.callbacks) - 1

    def core_address(self, context: Context, program: int, index: Index) -> ir.Value:
        """The address of another core: number `index`, row-major, of a program."""
        function = context.function
        launch = function.core_field("Core.launch", pointer)
        cores = function.at_entry(
            "cores",
            lambda builder: function.load_invariant(
                function.field(launch, "Launch.cores", builder), pointer, builder
            ),
        )
        position = function.add(index, self.programs[program].first_core)
        return function.advance(cores, function.multiply(position, self.offsets["sizeof.Core"]))

    def operand_address(self, function: FunctionBuilder, number: int) -> ir.Value:
        """The address of a kernel operand's buffer."""
        table = function.core_field("Core.buffers", pointer)
        return function.at_entry(
            ("operand", number),
            lambda builder: function.load_invariant(
                function.advance(table, number * 8, builder), pointer, builder
            ),
        )


_PRIVATE_SPACES = (
    _jax.TpuMemorySpace.VMEM,
    _jax.TpuMemorySpace.SMEM,
    _jax.TpuMemorySpace.SEMAPHORE,
)


def fill_zero(context: Context, address: ir.Value, size: Index) -> None:
    """Clears a block of memory."""
    function = context.function
    arguments = [
        address,
        ir.Constant(dtypes.i8, 0),
        function.index(size),
        ir.Constant(dtypes.i1, 0),
    ]
    callee = function.external(
        "llvm.memset.p0.i64", dtypes.void, [pointer, dtypes.i8, i64, dtypes.i1]
    )
    function.builder.call(callee, arguments)


def _semaphore_count(jaxpr: Any) -> int:
    """How many semaphores the scopes in a jaxpr allocate, each scope counted as often as it is written."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive is _jax.pallas_primitives.run_scoped_p:
            allocated = eqn.params["jaxpr"].invars
        elif eqn.primitive in (_jax.empty_ref_p, _jax.ref_p):
            allocated = eqn.outvars
        else:
            allocated = []
        count += sum(v.aval.size for v in allocated if dtypes.is_semaphore(v.aval.dtype))
        if eqn.primitive is _jax.tpu_primitives.get_barrier_semaphore_p:
            count += 1
        count += sum(map(_semaphore_count, inner_jaxprs(eqn)))
    return count


def _barrier_tags(jaxpr: Any) -> set[Any]:
    """The tags of the barrier semaphores that a jaxpr asks for."""
    tags = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive is _jax.tpu_primitives.get_barrier_semaphore_p:
            tags.add(eqn.params["tag"])
        tags.update(*map(_barrier_tags, inner_jaxprs(eqn)))
    return tags


_REMOTE = (
    _jax.pallas_primitives.semaphore_signal_p,
    _jax.tpu_primitives.dma_start_p,
    _jax.sc_primitives.fetch_and_add_p,
)


def _reaches_other_cores(jaxpr: Any) -> bool:
    """Whether a jaxpr signals semaphores or starts DMAs of other cores."""
    for eqn in jaxpr.eqns:
        if eqn.primitive in _REMOTE:
            tree = eqn.params.get("args_tree", eqn.params.get("tree"))
            leaves = tree.unflatten(eqn.invars) if tree is not None else ()
            if eqn.primitive is _jax.sc_primitives.fetch_and_add_p or leaves[-1] is not None:
                return True
            if (
                eqn.primitive is _jax.pallas_primitives.semaphore_signal_p
                and leaves[-2] is not None
            ):
                return True
        if any(map(_reaches_other_cores, inner_jaxprs(eqn))):
            return True
    return False


def _uses_barrier(jaxpr: Any) -> bool:
    return any(
        eqn.primitive is _jax.sc_primitives.barrier_p or any(map(_uses_barrier, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _is_sparse_core(mesh: Any) -> bool:
    return isinstance(mesh, _jax.VectorSubcoreMesh | _jax.ScalarSubcoreMesh)


def _group_axis(mesh: Any) -> int:
    """The axis along which cores have different shared memory: the SparseCore axis, or none."""
    return 0 if _is_sparse_core(mesh) else -1


def _group_count(mesh: Any) -> int:
    return next(iter(mesh.shape.values())) if _is_sparse_core(mesh) else 1


__all__ = [
    "ALIGNMENT",
    "CompiledKernel",
    "Kernel",
    "fill_zero",
    "i32",
    "np",
    "round_up",
    "space_of",
]
