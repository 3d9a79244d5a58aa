"""What a rule works with: the program being compiled, the function being built, and what can be
done with values.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes, nests
from cokernel.compiler.dtypes import i1, i32, pointer
from cokernel.compiler.function import FunctionBuilder, Index
from cokernel.compiler.memory import Allocation, Arena
from cokernel.compiler.sites import Site, SiteTable
from cokernel.compiler.values import (
    Buffer,
    Expression,
    Packed,
    Scalar,
    Value,
    is_small,
    make_packed,
    pack,
    store_element,
    store_vector,
)
from cokernel.records import record
from cokernel.source_lines import SourceLine, user_line

# What says whether, and how often, the equations inside of it run.
CONDITIONS = frozenset({_jax.cond_p, _jax.while_p, _jax.sc_primitives.parallel_loop_p})

# An expression of at most this many elements is computed element by element straight into a vector.
UNROLLED_ELEMENTS = 8


@record
class Program:
    """What is known of one program while it is compiled."""

    name: str
    index: int
    mesh: Any
    # Where this program's cores start in the launch's array of cores.
    first_core: int
    axis_sizes: dict[Any, int]
    sites: SiteTable
    arena: Arena
    can_suspend: bool
    # Memory that lasts as long as the program, by what it is for; see `core_state.py`.
    state: dict[Any, Allocation] = dataclasses.field(default_factory=dict)
    # The scoped Refs that are read where an operand lies, by their variables: how, and the operand.
    borrowed: dict[Any, Any] = dataclasses.field(default_factory=dict)
    # The Refs that are computed where they will be copied to, by their variables: how.
    placed: dict[Any, Any] = dataclasses.field(default_factory=dict)
    # The matrix units that the program uses, by number.
    matrix_units: dict[int, Any] = dataclasses.field(default_factory=dict)


@record
class SharedFunction:
    """A function that all equations of a kind call."""

    function: FunctionBuilder
    calls: int = 0


class Context:
    """The state that rules share. `function` is the LLVM function that code goes into at the
    moment.
    """

    def __init__(self, kernel: Any, program: Program, function: FunctionBuilder):
        self.kernel = kernel
        self.program = program
        self.function = function
        self.line: SourceLine | None = None
        # Where the body of the pipeline that is being compiled finds its position in the grid, and
        # in the second row the extents of that.
        self.pipeline_position: Buffer | None = None
        # Whether the equation at hand is one of `analysis.finished_copies`.
        self.is_silent = False
        # In checked mode, the variables that hold what is read by polling, and whether the equation
        # at hand reads one.
        self.polled: set[Any] = set()
        self.is_polled = False
        # What the runtime has said of the read before this equation; see `ops/definedness.py`.
        self.answer: Any = None
        # What the loop around this equation claims in checked mode, if it may; see `claims.py`.
        self.claims: Any = None
        # How many accesses to memory checked mode has been told of; see `program.py`.
        self.probe_count = 0
        # In checked mode, for each jaxpr being walked, innermost last: the Refs whose scope ends
        # with it, and the operations that made them.
        self.open_scopes: list[list[tuple[Any, str]]] = []
        # The equation at hand of each jaxpr being walked, innermost last.
        self.equations: list[Any] = []
        # The operands of the equation at hand whose place its result may take: see `liveness.py`.
        self.overwritable: list[Value] = []

    @property
    def builder(self) -> ir.IRBuilder:
        return self.function.builder

    @property
    def is_checked(self) -> bool:
        """Whether code is emitted for checked mode."""
        return self.kernel.checked is not None

    # Places in the user's program.

    def site(self, operation: str, name: str = "", **details: Any) -> ir.Constant:
        """The number by which the runtime refers to the current source line and to the Ref called
        `name`.
        """
        if around := self._conditions():
            details["around"] = around
        return ir.Constant(i32, self._site_number(self.line, operation, name, **details))

    def _site_number(
        self, line: SourceLine | None, operation: str, name: str, **details: Any
    ) -> int:
        program = self.program
        pairs = tuple(sorted(details.items()))
        return program.sites.number(Site(program.name, program.index, operation, name, line, pairs))

    def _conditions(self) -> tuple[int, ...]:
        """The sites of the branches and loops around an equation whose conditions may be undefined:
        they say whether the core comes to it.
        """
        checked = self.kernel.checked
        if checked is None or not checked.uninitialised:
            return ()
        around = [eqn for eqn in self.equations[:-1] if eqn is not None]
        conditions = [eqn for eqn in around if eqn.primitive in CONDITIONS]
        lines = [user_line(eqn.source_info.traceback) for eqn in conditions]
        return tuple(
            self._site_number(line, eqn.primitive.name, "")
            for eqn, line in zip(conditions, lines, strict=True)
            if line is not None
        )

    def describe(self) -> str:
        """The program and source line being compiled, for the text of an error."""
        where = f" at {self.line}" if self.line is not None else ""
        return f"program {self.program.name!r}{where}"

    # Memory.

    def private_address(self, offset: int) -> ir.Value:
        """An address in the private block of this core."""
        base = self.function.core_field("Core.memory", pointer)
        if offset == 0:
            return base
        return self.function.at_entry(
            ("private", offset), lambda builder: self.function.advance(base, offset, builder)
        )

    def operand_address(self, number: int) -> ir.Value:
        """The address of a buffer of the custom call."""
        return self.kernel.operand_address(self.function, number)

    def axis_coordinate(self, axis: Any) -> ir.Value:
        """This core's position on an axis of its mesh, or the device's on an axis around the
        kernel; an i32.
        """
        function = self.function
        if isinstance(axis, tuple | list):
            sizes = [self.axis_size(name) for name in axis]
            total: ir.Value = ir.Constant(i32, 0)
            for name, size in zip(axis, sizes, strict=True):
                total = self.builder.add(
                    self.builder.mul(total, ir.Constant(i32, size)), self.axis_coordinate(name)
                )
            return total
        names = list(self.program.mesh.shape)
        if axis in names:
            offset = self.program_coordinate_offset(names.index(axis))
            return function.at_entry(
                ("axis", axis),
                lambda builder: function.load_invariant(
                    function.advance(function.core, offset, builder), i32, builder
                ),
            )
        outer = self.kernel.outer_axes
        if axis in outer:
            number = self.kernel.operand_count + outer.index(axis)
            return function.load_invariant(self.operand_address(number), i32)
        raise ValueError(
            f"{self.describe()}: there is no axis {axis!r}; the program's mesh has {names}"
        )

    def axis_size(self, axis: Any) -> int:
        """The size of an axis of the program's mesh or around the kernel."""
        if axis in self.program.axis_sizes:
            return self.program.axis_sizes[axis]
        return self.kernel.outer_sizes[self.kernel.outer_axes.index(axis)]

    def program_coordinate_offset(self, dimension: int) -> int:
        """Where a core keeps its position in one dimension of its mesh."""
        return self.function.offsets["Core.coordinates"] + 4 * dimension

    # Values.

    def settle(self, value: Expression) -> Value:
        """The form in which a new expression is kept: a vector if it is small, else as it is."""
        if not value.shape:
            return Scalar((), value.dtype, pack(self.function, value))
        if not is_small(value.shape, value.dtype):
            return value
        return make_packed(value.shape, value.dtype, self.pack(value))

    def pack(self, value: Value) -> ir.Value:
        """The elements of a small value in one register."""
        if isinstance(value, Expression) and value.size > UNROLLED_ELEMENTS:
            value = self.materialise(value)
        return pack(self.function, value)

    def scalar(self, value: Value) -> ir.Value:
        """The register of a value with one element."""
        return pack(self.function, value)

    def index(self, value: Value) -> Index:
        """An integer scalar as an index: an int where it is constant, else sign- or zero-extended
        to i64.
        """
        register = self.scalar(value)
        if isinstance(register, ir.Constant) and isinstance(register.constant, int):
            return register.constant
        if register.type == dtypes.i64:
            return register
        if dtypes.kind(value.dtype) is dtypes.Kind.SIGNED:
            return self.builder.sext(register, dtypes.i64)
        return self.builder.zext(register, dtypes.i64)

    def materialise(self, value: Value) -> Buffer:
        """The value in memory: a buffer as it is, anything else stored to a temporary."""
        if isinstance(value, Buffer):
            return value
        buffer = nests.dense_buffer(self, value.shape, value.dtype)
        self.store(buffer, value, is_fresh=True)
        return buffer

    def dense(self, value: Value) -> Buffer:
        """The value in memory, its elements one after the other."""
        if isinstance(value, Buffer) and not value.is_dense:
            return self.copy(value)
        return self.materialise(value)

    def copy(self, value: Value) -> Buffer:
        """The value in a temporary of its own."""
        buffer = nests.dense_buffer(self, value.shape, value.dtype)
        self.store(buffer, value, is_fresh=True)
        return buffer

    def may_overwrite(self, value: Value) -> bool:
        """Whether the equation at hand may put its result where this operand lies."""
        return any(value is operand for operand in self.overwritable)

    def copy_or_overwrite(self, value: Value) -> Buffer:
        """The value in memory that may be written to: its own if nobody else needs it. Only for the
        operands of the equation at hand, before any inner jaxpr is emitted.
        """
        if isinstance(value, Buffer) and self.may_overwrite(value):
            return value
        return self.copy(value)

    def keep(self, value: Value) -> Value:
        """The value in a form that no later write to a Ref can change, and that costs nothing to
        use again.
        """
        if isinstance(value, Scalar | Packed) or (isinstance(value, Buffer) and value.root is None):
            return value
        return self.copy(value)

    def store(self, target: Buffer, value: Value, *, is_fresh: bool = False) -> None:
        """Writes a value to memory of the same shape. Unless `is_fresh`, the value may read the
        target, though only each element at its own place.
        """
        if target.size == 0:
            return
        if isinstance(value, Scalar | Packed):
            return self._store_register(target, value)
        if isinstance(value, Buffer) and is_fresh and value.is_dense and target.is_dense:
            return nests.copy_dense(
                self.function,
                target.address,
                value.address,
                target.size * dtypes.itemsize(target.dtype),
            )
        nests.store_nest(self, target, value, is_fresh=is_fresh)

    def _store_register(self, target: Buffer, value: Scalar | Packed) -> None:
        function = self.function
        if value.size == 1:
            address = target.element_address(function, [0] * len(target.shape))
            return store_element(function, value.register, address, target.dtype)
        if target.is_dense:
            return store_vector(function, value.register, target.address, target.dtype)
        run = 1
        for extent, stride in zip(reversed(target.shape), reversed(target.strides), strict=True):
            if extent != 1 and stride != run:
                break
            run *= extent
        from cokernel.compiler.values import shuffle

        for lane, index in enumerate(np.ndindex(*target.shape)):
            if lane % run == 0:
                row = shuffle(function, value.register, range(lane, lane + run))
                address = target.element_address(function, [int(i) for i in index])
                store_vector(function, row, address, target.dtype)

    # Functions.

    def call(self, callee: FunctionBuilder, arguments: Sequence[ir.Value]) -> list[ir.Value]:
        """Calls a function built beside this one and leaves this one too if it failed."""
        result = self.builder.call(callee.function, [self.function.core, *arguments])
        if callee.can_fail:
            good = self.function.function.append_basic_block("returned")
            failed = self.builder.extract_value(result, 0)
            self.builder.cbranch(failed, self.function.failure(), good).set_weights([1, 1 << 20])
            self.builder.position_at_end(good)
        return [
            self.builder.extract_value(result, number + 1) for number in range(len(callee.results))
        ]

    def call_shared(
        self,
        key: tuple[Any, ...],
        arguments: Sequence[ir.Value],
        result_types: Sequence[ir.Type],
        build: Callable[[Sequence[ir.Value]], Sequence[ir.Value]],
    ) -> list[ir.Value]:
        """Calls the kernel's function for `key`, whose first entry names it; the first call has it
        built. `build` receives the parameters and returns the results, and may use nothing else
        that depends on the call.
        """
        shared = self.kernel.register_functions.get(key)
        if shared is None:
            types = [argument.type for argument in arguments]
            inner = self.function.sibling(key[0], types, result_types)
            with self.inside(inner):
                inner.finish(build(inner.parameters))
            shared = self.kernel.register_functions[key] = SharedFunction(inner)
        shared.calls += 1
        return self.call(shared.function, arguments)

    @contextlib.contextmanager
    def inside(self, function: FunctionBuilder) -> Iterator[None]:
        """Lets code go into another function for a while."""
        outer, self.function = self.function, function
        try:
            yield
        finally:
            self.function = outer

    def check(self, condition: ir.Value, record: Callable[[], None]) -> None:
        """Leaves the program unless `condition` holds, after `record` has emitted the call that
        says why.
        """
        if isinstance(condition, ir.Constant) and condition.type == i1 and condition.constant:
            return
        self.function.check(condition, record)
