"""Where the memory of a kernel lies: operands, scratch, what programs allocate as they run,
semaphores.

Each core has a private block that begins with its semaphores, so that one memset clears them. The
cores of a SparseCore share a block, and all cores of a launch share another.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.analysis import (
    argument_names,
    barrier_tags,
    reaches_other_cores,
    semaphore_count,
)
from cokernel.compiler.context import Context
from cokernel.compiler.memory import Arena
from cokernel.compiler.memory_map import DescribedRef, describe_refs
from cokernel.compiler.nests import fill_zero
from cokernel.compiler.probes import Access, allocated, probe_whole, released
from cokernel.compiler.refs import POINTER_BYTES, Place, RefValue
from cokernel.compiler.window_names import Slots
from cokernel.source_lines import SourceLine

_PRIVATE_SPACES = (
    _jax.TpuMemorySpace.VMEM,
    _jax.TpuMemorySpace.SMEM,
    _jax.TpuMemorySpace.SEMAPHORE,
)


def space_of(aval: Any) -> tuple[Any, Any]:
    """The memory space of an aval and the mesh it is tied to, if any."""
    space = getattr(aval, "memory_space", None)
    if isinstance(space, _jax.CoreMemorySpace):
        return space.memory_space, space.mesh
    return space, None


class MemoryLayout:
    """Plans the memory of a kernel: its parameters at once, and scopes as they are met."""

    def __init__(
        self,
        kernel_name: str,
        jaxprs: Sequence[Any],
        meshes: Sequence[Any],
        program_names: Sequence[str],
        *,
        operand_count: int,
        result_count: int,
        aliases: Sequence[tuple[int, int]],
        outer_axes: Sequence[Any],
    ):
        self.kernel_name = kernel_name
        self.jaxprs = tuple(jaxprs)
        self.meshes = tuple(meshes)
        self.program_names = list(program_names)
        self.operand_count = operand_count
        self.result_count = result_count
        # Pairs of an operand and the result that overwrites it.
        self.aliases = tuple(aliases)
        self.outer_axes = list(outer_axes)
        self.arenas = [Arena() for _ in meshes]
        self.shared_arena = Arena()
        self.device_arena = Arena()
        self.instance_operands: list[dict[str, Any]] = []
        self.has_remote_access = any(map(reaches_other_cores, jaxprs))
        # Allocations that live as long as the kernel.
        self._permanent: list[Any] = []
        # Where the next semaphore of a scope goes, and what reports say of those there are, by
        # program.
        self._scoped_semaphores: list[int] = []
        self._scoped_names: dict[int, list[list[Any]]] = {}
        self._barrier_semaphores: dict[tuple[int, Any], RefValue] = {}
        # Scoped Refs and the lines that allocate them, by program; kept in checked mode only.
        self._scoped_refs: dict[int, list[tuple[RefValue, SourceLine | None]]] = {}
        # The RefValues of each program's parameters.
        self.refs = self._plan_refs()

    def _plan_refs(self) -> list[list[RefValue]]:
        """The RefValues of each program's parameters. Programs share the Refs themselves but each
        has its own names.
        """
        variables = self.jaxprs[0].invars
        names = [argument_names(jaxpr, len(variables), "argument") for jaxpr in self.jaxprs]
        scoped = [semaphore_count(jaxpr) for jaxpr in self.jaxprs]
        scratch_start = self.operand_count + self.result_count
        # Semaphores come first in each private block, so that one memset clears them: the scratch
        # ones, then the scoped ones.
        scratch_semaphores = [0] * len(self.jaxprs)
        for variable in variables[scratch_start:]:
            if dtypes.is_semaphore(variable.aval.dtype) and space_of(variable.aval)[0] is not None:
                scratch_semaphores[self._owner(variable.aval)] += variable.aval.size
        next_semaphore = [0] * len(self.jaxprs)
        self._scoped_semaphores = [count * dtypes.SEMAPHORE_BYTES for count in scratch_semaphores]
        self.semaphore_bytes = [
            (scratch + inner) * dtypes.SEMAPHORE_BYTES
            for scratch, inner in zip(scratch_semaphores, scoped, strict=True)
        ]
        for arena, size in zip(self.arenas, self.semaphore_bytes, strict=True):
            if size:
                self._permanent.append(arena.allocate(size))
        shared: list[RefValue] = []
        for position, variable in enumerate(variables):
            if position < scratch_start:
                shared.append(self._plan_operand(position, variable.aval, names[0][position]))
            else:
                shared.append(self._plan_scratch(variable.aval, names[0][position], next_semaphore))
        # The same RefValue object stands for the same memory in all programs; a program's own names
        # only matter in reports.
        return [
            self._with_aliases(
                [
                    ref if name == ref.name else dataclasses.replace(ref, name=name)
                    for ref, name in zip(shared, program_names, strict=True)
                ]
            )
            for program_names in names
        ]

    def _with_aliases(self, refs: list[RefValue]) -> list[RefValue]:
        for operand, result in self.aliases:
            position = self.operand_count + result
            refs[position] = dataclasses.replace(refs[position], overwrites=refs[operand])
        return refs

    def _owner(self, aval: Any) -> int:
        """The number of the program whose cores own instances of a Ref."""
        _, mesh = space_of(aval)
        if mesh is None:
            if len(self.meshes) == 1:
                return 0
            raise ValueError(
                f"kernel {self.kernel_name!r}: a Ref in {aval.memory_space} belongs to no mesh; "
                "with several meshes write "
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
                f"kernel {self.kernel_name!r}: scratch {name!r} of type {aval} is not a Ref"
            )
        space, mesh = space_of(aval)
        size = aval.size * dtypes.itemsize(aval.dtype)
        if dtypes.is_semaphore(aval.dtype):
            program = self._owner(aval)
            offset = next_semaphore[program] * dtypes.SEMAPHORE_BYTES
            next_semaphore[program] += aval.size
            return self._ref(aval, name, Place.PRIVATE, offset, program)
        if space is _jax.TpuMemorySpace.VMEM_SHARED:
            ref = self._ref(aval, name, Place.SHARED, self._keep(self.shared_arena, size), None)
            return dataclasses.replace(ref, mesh=mesh)
        if space in (_jax.TpuMemorySpace.HBM, _jax.PallasMemorySpace.ANY):
            return self._ref(aval, name, Place.DEVICE, self._keep(self.device_arena, size), None)
        program = self._owner(aval)
        offset = self._keep(self.arenas[program], size)
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

    def allocate_scoped(
        self,
        context: Context,
        aval: Any,
        name: str,
        operation: str,
        slots: Slots | None = None,
    ) -> RefValue:
        """Memory for a Ref that a program allocates while it runs: private memory is used again
        after the scope. `operation` is what the program calls to get it, `slots` what a pipeline
        keeps there.
        """
        ref = self._allocate_scoped(context, aval, name)
        ref = dataclasses.replace(ref, slots=slots) if slots else ref
        if context.is_checked:
            self._scoped_refs.setdefault(context.program.index, []).append((ref, context.line))
            # All cores that share memory meet this line, each when it comes to it.
            if ref.place is Place.PRIVATE:
                allocated(context, ref, operation, starts_at_zero=not self.has_remote_access)
            if isinstance(space_of(aval)[0], _jax.AccMemorySpace):
                # Once more, since the memory has just been made to look uninitialised.
                fill_zero(context, ref.address(context), ref.nbytes)
                probe_whole(context, ref, Access.WRITE, operation)
        return ref

    def release_scoped(self, context: Context, ref: RefValue, operation: str) -> None:
        """Says in checked mode that the scope of a Ref has ended."""
        if context.is_checked and ref.place is Place.PRIVATE:
            released(context, ref, operation, starts_at_zero=not self.has_remote_access)

    def _allocate_scoped(self, context: Context, aval: Any, name: str) -> RefValue:
        program = context.program.index
        size = aval.size * dtypes.itemsize(aval.dtype)
        space, mesh = space_of(aval)
        if mesh is not None and mesh != context.program.mesh:
            raise ValueError(
                f"{context.describe()}: {name!r} is allocated for another mesh than the "
                "program's own"
            )
        if dtypes.is_semaphore(aval.dtype):
            offset = self._scoped_semaphores[program]
            self._scoped_semaphores[program] += size
            ref = self._ref(aval, name, Place.PRIVATE, offset, program)
            self._scoped_names.setdefault(program, []).append(
                [offset, size, name, list(aval.shape)]
            )
            if not self.has_remote_access:
                # The scope may be entered again with a count left over. Where other cores reach
                # semaphores, a signal may come before the scope is entered, so there the count is
                # kept, as the hardware does.
                fill_zero(context, ref.address(context), size)
            return ref
        if space is _jax.TpuMemorySpace.VMEM_SHARED:
            return self._ref(aval, name, Place.SHARED, self._keep(self.shared_arena, size), None)
        owner = self.arenas[program].allocate(size)
        ref = self._ref(aval, name, Place.PRIVATE, owner.offset, program, owner)
        if isinstance(space, _jax.AccMemorySpace):
            fill_zero(context, ref.address(context), size)
        return ref

    def borrow(self, context: Context, variable: Any, name: str) -> RefValue:
        """Room for the addresses of a Ref's slots, or of the whole Ref, which lie in an operand: at
        the beginning of it, until blocks are copied.
        """
        borrowing, operand = context.program.borrowed[variable]
        aval, program = variable.aval, context.program.index
        count = aval.shape[0] if borrowing.has_slots else 1
        owner = self.arenas[program].allocate(count * POINTER_BYTES)
        ref = self._ref(aval, name, Place.PRIVATE, owner.offset, program, owner)
        for slot in range(count):
            place = context.function.advance(ref.address(context), slot * POINTER_BYTES)
            context.builder.store(operand.address(context), place)
        return dataclasses.replace(ref, borrowed=borrowing.strides, has_slots=borrowing.has_slots)

    def in_place(self, context: Context, variable: Any, ref: Any) -> Any:
        """A Ref as it is used where it is computed in place; itself where it is not. To begin with
        it is its own memory.
        """
        placement = context.program.placed.get(variable)
        if placement is None:
            return ref
        arena = self.arenas[context.program.index]
        if placement.spare_bytes > ref.nbytes:
            spare = arena.allocate(placement.spare_bytes)
            ref = dataclasses.replace(ref, offset=spare.offset, owner=spare)
        owner = arena.allocate(POINTER_BYTES)
        placed = dataclasses.replace(
            ref,
            offset=owner.offset,
            owner=owner,
            borrowed=placement.strides,
            has_slots=placement.has_slots,
            unplaced=ref,
        )
        context.builder.store(ref.address(context), placed.address(context))
        return placed

    def allocate_collective(
        self, context: Context, aval: Any, name: str, groups: Sequence[int]
    ) -> RefValue:
        """Memory that groups of cores share while the launch lasts, in dimensions in front of the
        Ref's own.
        """
        if dtypes.is_semaphore(aval.dtype):
            raise NotImplementedError(
                f"{context.describe()}: {name!r} holds semaphores that several cores would share; "
                "allocate them as scratch and name a core with device_id"
            )
        shape = (*groups, *aval.shape)
        size = math.prod(shape) * dtypes.itemsize(aval.dtype)
        offset = self._keep(self.device_arena, size)
        ref = self._ref(aval, name, Place.DEVICE, offset, None)
        ref = dataclasses.replace(ref, shape=shape)
        if context.is_checked:
            self._scoped_refs.setdefault(context.program.index, []).append((ref, context.line))
        return ref

    def clear_accumulators(self, context: Context) -> None:
        """Clears the accumulators of matrix units among a program's scratch: they start at zero."""
        variables = self.jaxprs[0].invars
        program = context.program.index
        for variable, ref in zip(variables, self.refs[program], strict=True):
            space, _ = space_of(variable.aval)
            if isinstance(space, _jax.AccMemorySpace) and ref.program == program:
                fill_zero(context, ref.address(context), ref.nbytes)
                probe_whole(context, ref, Access.WRITE, "accumulator")

    def barrier_semaphore(self, program: int, tag: Any, aval: Any) -> RefValue:
        """The semaphore that `get_barrier_semaphore(tag)` means in a program: one per core, for the
        whole launch.
        """
        known = self._barrier_semaphores.get((program, tag))
        if known is None:
            offset = self._scoped_semaphores[program]
            self._scoped_semaphores[program] += dtypes.SEMAPHORE_BYTES
            known = self._ref(aval, "barrier_semaphore", Place.PRIVATE, offset, program)
            self._barrier_semaphores[program, tag] = known
            self._scoped_names.setdefault(program, []).append(
                [offset, dtypes.SEMAPHORE_BYTES, known.name, []]
            )
        return known

    def barrier_semaphore_of(self, program: int, ref: RefValue, device_id: Any) -> RefValue:
        """The barrier semaphore that a signal means: that of another mesh if `device_id` names an
        axis which only that has. Any other semaphore stays what it is.
        """
        tags = [tag for (_, tag), known in self._barrier_semaphores.items() if known is ref]
        if not tags or not isinstance(device_id, dict):
            return ref
        named = {axis for key in device_id for axis in (key if isinstance(key, tuple) else (key,))}
        foreign = named - {*self.meshes[program].shape, *self.outer_axes}
        for other, (mesh, jaxpr) in enumerate(zip(self.meshes, self.jaxprs, strict=True)):
            if foreign and foreign <= {*mesh.shape}:
                if tags[0] not in barrier_tags(jaxpr):
                    raise ValueError(
                        f"kernel {self.kernel_name!r}: program {self.program_names[program]!r} "
                        "signals the barrier semaphore of "
                        f"{mesh}, but program {self.program_names[other]!r} there never calls "
                        "get_barrier_semaphore"
                    )
                aval = _jax.AbstractRef(
                    _jax.ShapedArray((), ref.dtype), _jax.TpuMemorySpace.SEMAPHORE
                )
                return self.barrier_semaphore(other, tags[0], aval)
        return ref

    def describe(self, *, with_refs: bool) -> dict[str, Any]:
        """Which semaphore lies where, as plain data for reports.

        "semaphores": for each program those in the private block of its cores, as [offset, bytes,
        name, shape]. "instances": for each buffer that holds one instance per core of a mesh its
        "name", "shape", "bytes" (of one instance), "program" (None if the mesh has none here) and
        the "axes" and "sizes" of the mesh. "axes": the axes of each program's mesh. "refs": every
        Ref of the kernel, if `with_refs`; see `describe_refs`.
        """
        semaphores: dict[str, list[list[Any]]] = {}
        for program in range(len(self.meshes)):
            entries = [
                [ref.offset, ref.nbytes, ref.name, list(ref.shape)]
                for ref in self.refs[program]
                if ref.place is Place.PRIVATE
                and ref.program == program
                and dtypes.is_semaphore(ref.dtype)
            ]
            entries += self._scoped_names.get(program, [])
            semaphores[str(program)] = entries
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
            **({"refs": self._describe_refs()} if with_refs else {}),
        }

    def outputs(self) -> list[list[int]]:
        """What a launch leaves to others: the number of each result's buffer, and the bytes of an
        element. A result that overwrites an operand holds what that held.
        """
        results = self.refs[0][self.operand_count : self.operand_count + self.result_count]
        return [[ref.offset, ref.itemsize] for ref in results if ref.place is Place.OPERAND]

    def _describe_refs(self) -> list[dict[str, Any]]:
        """Where every Ref lies, for reports of checked mode: see `describe_refs`."""
        scratch_count = len(self.refs[0]) - self.operand_count - self.result_count
        kinds = [
            *["argument"] * self.operand_count,
            *["output"] * self.result_count,
            *["scratch"] * scratch_count,
        ]
        known = [
            DescribedRef(ref, kind, None) for ref, kind in zip(self.refs[0], kinds, strict=True)
        ]
        known += [
            DescribedRef(ref, "scoped", line)
            for refs in self._scoped_refs.values()
            for ref, line in refs
        ]
        return describe_refs(known)
