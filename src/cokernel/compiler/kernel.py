"""A whole kernel: its operands, its scratch and their places in memory, and the module its programs
are compiled into.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from cokernel import _jax
from cokernel.checking.options import Checked
from cokernel.compiler.access import read
from cokernel.compiler.analysis import (
    may_suspend,
    uses_barrier,
    with_reached_memory,
    writes_to_other_cores,
)
from cokernel.compiler.borrowed import Borrowing, borrowed_blocks
from cokernel.compiler.calls import with_plain_calls
from cokernel.compiler.context import Context, Program, SharedFunction
from cokernel.compiler.core_state import clear_state
from cokernel.compiler.definedness import follow_undefined_values
from cokernel.compiler.dtypes import pointer
from cokernel.compiler.few_bits import without_few_bits
from cokernel.compiler.function import FunctionBuilder, Index
from cokernel.compiler.in_place import Placement, placed_blocks
from cokernel.compiler.keys import without_keys
from cokernel.compiler.layout import MemoryLayout
from cokernel.compiler.pipelines import without_pipelines
from cokernel.compiler.polling import with_steps
from cokernel.compiler.probes import Access
from cokernel.compiler.program import lower_jaxpr
from cokernel.compiler.refs import Place, RefValue
from cokernel.compiler.sites import SiteTable, callers_of
from cokernel.compiler.transforms import resolve
from cokernel.records import record
from cokernel.source_lines import SourceLine

# A function shared by at most so many calls is inlined into each.
INLINED_CALLS = 4


@record(frozen=True)
class CompiledKernel:
    """LLVM IR of all programs, and what the runtime must know to launch them. All of it is plain
    data but `callbacks`.
    """

    ir: str
    spec: dict[str, Any]
    sites: list[dict[str, Any]]
    # Where each semaphore and Ref lies, for reports that are given an address: see
    # `MemoryLayout.describe`.
    memory: dict[str, Any]
    callbacks: list[dict[str, Any]]
    # Sentences that say what the probes of checked mode cannot see.
    unchecked: list[str]


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
        aliases: Sequence[tuple[int, int]],
        outer_axes: Sequence[Any],
        outer_sizes: Sequence[int],
        bounds_checks: bool,
        offsets: dict[str, int],
        checked: Checked | None = None,
        made_at: SourceLine | None = None,
    ):
        self.name = name
        self.jaxprs = tuple(
            without_keys(without_few_bits(with_plain_calls(without_pipelines(jaxpr, mesh))))
            for jaxpr, mesh in zip(jaxprs, meshes, strict=True)
        )
        if checked is not None and checked.uninitialised:
            # In the padding of its tiles even an operand is undefined.
            always_defined = 0 if checked.padded_tiles else operand_count
            self.jaxprs = follow_undefined_values(self.jaxprs, always_defined)
        self.jaxprs = with_reached_memory(self.jaxprs)
        # Whether what a core has for itself may change while it polls that.
        self.cores_write_to_others = any(map(writes_to_other_cores, self.jaxprs))
        self.meshes = tuple(meshes)
        self.external_meshes = tuple(external_meshes)
        self.bounds_checks = bounds_checks
        self.offsets = offsets
        # What checked mode is to look for; None in native mode, whose code has no probes.
        self.checked = checked
        # Reports name it where they are about memory that lasts as long as the launch.
        self.made_at = made_at
        self.unchecked: list[str] = []
        self.operand_count = operand_count
        self.result_count = result_count
        # Axes of a shard_map around the kernel; their indices are passed as operands behind the
        # user's own.
        self.outer_axes = list(outer_axes)
        self.outer_sizes = list(outer_sizes)
        self.sites = SiteTable()
        self.module = ir.Module(name)
        # Functions that all programs may call, by what they compute.
        self.shared_functions: dict[Any, FunctionBuilder] = {}
        self.callbacks: list[dict[str, Any]] = []
        # The same for functions of registers, with their numbers of calls: see
        # `Context.call_shared`.
        self.register_functions: dict[tuple[Any, ...], SharedFunction] = {}
        self.program_names = [
            (jaxpr.debug_info.func_name if jaxpr.debug_info is not None else None)
            or f"program{number}"
            for number, jaxpr in enumerate(jaxprs)
        ]
        self.layout = MemoryLayout(
            name,
            self.jaxprs,
            meshes,
            self.program_names,
            operand_count=operand_count,
            result_count=result_count,
            aliases=aliases,
            outer_axes=outer_axes,
        )
        # What each program computes in place; checked mode follows every copy.
        self.placed: list[dict[Any, Placement]] = [{} for _ in self.jaxprs]
        if checked is None:
            self._place_blocks()
        elif sum(math.prod(mesh.shape.values()) for mesh in self.meshes) > 1:
            seen = [self._seen_by_several(number) for number in range(len(self.jaxprs))]
            self.jaxprs = with_steps(self.jaxprs, seen)
        self.programs = [self._plan_program(number) for number in range(len(self.jaxprs))]

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
            arena=self.layout.arenas[number],
            can_suspend=may_suspend(jaxpr, is_checked=self.checked is not None),
            borrowed=self._borrowed(number),
            placed=self.placed[number],
        )

    def _place_blocks(self) -> None:
        """Has the programs compute blocks of operands where these lie."""
        planned = []
        for number, jaxpr in enumerate(self.jaxprs):
            refs = dict(zip(jaxpr.invars, self.layout.refs[number], strict=True))

            def memory(var: Any, refs: dict[Any, RefValue] = refs) -> RefValue | None:
                return refs[var].memory if refs[var].place is Place.OPERAND else None

            planned.append(placed_blocks(jaxpr, memory, self._is_own(number)))
        self.jaxprs = tuple(jaxpr for jaxpr, _ in planned)
        self.placed = [placed for _, placed in planned]

    def _is_own(self, number: int) -> Callable[[Any], bool]:
        """Tells of a parameter of a program whether it is memory of the core's that no other
        program reaches."""
        refs = dict(zip(self.jaxprs[number].invars, self.layout.refs[number], strict=True))
        others = self._used_by_others(number)
        return lambda var: refs[var].place is Place.PRIVATE and refs[var].memory not in others

    def _seen_by_several(self, number: int) -> dict[Any, RefValue]:
        """The memory of those parameters of a program that are Refs which several cores reach."""
        parameters = zip(self.jaxprs[number].invars, self.layout.refs[number], strict=True)
        return {
            var: ref.memory
            for var, ref in parameters
            if isinstance(var.aval, _jax.AbstractRef) and ref.place is not Place.PRIVATE
        }

    def _used_by_others(self, number: int) -> set[RefValue]:
        """The memory that other programs than this one use."""
        return {
            ref.memory
            for other, jaxpr in enumerate(self.jaxprs)
            if other != number
            for var, ref in zip(jaxpr.invars, self.layout.refs[other], strict=True)
            if any(var is atom for eqn in jaxpr.eqns for atom in eqn.invars)
        }

    def _borrowed(self, number: int) -> dict[Any, tuple[Borrowing, RefValue]]:
        """The scoped Refs of a program that are read where an operand lies, with the operand.
        Checked mode follows every copy."""
        if self.checked is not None:
            return {}
        refs = dict(zip(self.jaxprs[number].invars, self.layout.refs[number], strict=True))
        written = self._written()

        def is_constant(var: Any) -> bool:
            ref = refs[var]
            return ref.place is Place.OPERAND and ref.memory not in written

        is_own, placed = self._is_own(number), self.placed[number]
        found = borrowed_blocks(
            self.jaxprs[number], is_constant, lambda var: is_own(var) and var not in placed
        )
        return {var: (borrowing, refs[borrowing.operand]) for var, borrowing in found.items()}

    def _written(self) -> set[RefValue]:
        """The memory of the operands that some program may change."""
        written = set()
        for jaxpr, refs in zip(self.jaxprs, self.layout.refs, strict=True):
            of_var = dict(zip(jaxpr.invars, refs, strict=True))
            for effect in jaxpr.effects:
                if isinstance(effect, _jax.JaxprInputEffect) and not isinstance(
                    effect, _jax.ReadEffect
                ):
                    var = effect.input
                    var = jaxpr.invars[var] if isinstance(var, int) else var
                    if var in of_var:
                        written.add(of_var[var].memory)
        return written

    # Code.

    def compile(self) -> CompiledKernel:
        """Emits all programs and returns their IR with the plan of memory."""
        for program, jaxpr, refs in zip(self.programs, self.jaxprs, self.layout.refs, strict=True):
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
                self._as_used(context, var, ref)
                if isinstance(var.aval, _jax.AbstractRef)
                else read(context, resolve(context, ref, (), "read", access=Access.READ))
                for var, ref in zip(jaxpr.invars, refs, strict=True)
            ]
            self.layout.clear_accumulators(context)
            lower_jaxpr(context, jaxpr, arguments)
            clear_state(function, program)
            function.finish()
        self._inline_the_rarely_shared()
        return CompiledKernel(
            ir=str(self.module),
            spec=self._spec(),
            sites=self.sites.to_list(),
            memory=self._describe_memory(),
            callbacks=self.callbacks,
            unchecked=self.unchecked,
        )

    def _as_used(self, context: Context, var: Any, ref: RefValue) -> RefValue:
        """A parameter of a program, or what stands for it where it is borrowed or in place."""
        if var in context.program.borrowed:
            return self.layout.borrow(context, var, ref.name)
        return self.layout.in_place(context, var, ref)

    def _describe_memory(self) -> dict[str, Any]:
        """What `MemoryLayout.describe` tells; in checked mode also all Refs, and in "made_at" the
        line that made the kernel."""
        if self.checked is None:
            return self.layout.describe(with_refs=False)
        line = self.made_at
        made_at = line and {
            "file": line.file,
            "line": line.line,
            "function": line.function,
            **callers_of(line),
        }
        return {**self.layout.describe(with_refs=True), "made_at": made_at}

    def _inline_the_rarely_shared(self) -> None:
        """A function with few calls costs less compile time than its calls would cost at run time:
        the vectors that a caller holds go to the stack around each."""
        for shared in self.register_functions.values():
            if shared.calls <= INLINED_CALLS:
                attributes = shared.function.function.attributes
                attributes.discard("noinline")
                attributes.add("alwaysinline")

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
                    "uses_barrier": uses_barrier(jaxpr),
                }
                for program, jaxpr, size in zip(
                    self.programs, self.jaxprs, self.layout.semaphore_bytes, strict=True
                )
            ],
            "group_count": groups if self.layout.shared_arena.size else 0,
            "shared_bytes": self.layout.shared_arena.size,
            "device_bytes": self.layout.device_arena.size,
            "instance_operands": self.layout.instance_operands,
            **({} if self.checked is None else {"checked": self._checked_spec(self.checked)}),
        }

    def _checked_spec(self, checked: Checked) -> dict[str, Any]:
        return {
            **checked.for_runtime(),
            "outputs": self.layout.outputs(),
            "sees_all": not self.unchecked,
        }

    # What rules ask.

    def add_callback(self, function: Callable[..., Any], operands: int, results: int) -> int:
        """Registers a Python function that compiled code calls; returns its number."""
        self.callbacks.append({"function": function, "operands": operands, "results": results})
        return len(self.callbacks) - 1

    def note_unchecked(self, context: Context, what: str, why: str) -> None:
        """Remembers an operation that checked mode cannot look into."""
        if self.checked is None:
            return
        sentence = f"{context.describe()}: {what}: {why}"
        if sentence not in self.unchecked:
            self.unchecked.append(sentence)

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


def _is_sparse_core(mesh: Any) -> bool:
    return isinstance(mesh, _jax.VectorSubcoreMesh | _jax.ScalarSubcoreMesh)


def _group_axis(mesh: Any) -> int:
    """The axis along which cores have different shared memory: the SparseCore axis, or none."""
    return 0 if _is_sparse_core(mesh) else -1


def _group_count(mesh: Any) -> int:
    return next(iter(mesh.shape.values())) if _is_sparse_core(mesh) else 1
