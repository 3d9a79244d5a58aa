"""One LLVM function under construction: its builder, loops, index arithmetic, intrinsics, and how
it is left early.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from cokernel.compiler import dtypes
from cokernel.compiler.dtypes import i1, i8, i32, i64, pointer, void

# A nest over at least so many elements looks whether the launch has been stopped, about every so
# many.
LONG_NEST_ELEMENTS = 1 << 20
WATCHED_ELEMENTS = 1 << 16

# A loop whose body has so many instructions keeps the processor waiting for results rather than for
# memory; with more it would take long to compile.
LONG_LOOP_INSTRUCTIONS = range(20, 400)

# An index or extent: a Python int while it is known at compile time, else an i64 in the function
# being built.
type Index = int | ir.Value


class TokenType(ir.Type):
    """LLVM's `token`, which the coroutine intrinsics pass around and llvmlite does not know."""

    def _to_string(self) -> str:
        return "token"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenType)

    def __hash__(self) -> int:
        return hash(TokenType)

    def format_constant(self, value: str) -> str:
        return value


token = TokenType()


def type_suffix(kind: ir.Type) -> str:
    """How LLVM spells a type inside the name of an overloaded intrinsic, such as v4f32."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{type_suffix(kind.element)}"
    if isinstance(kind, ir.PointerType):
        return "p0"
    return {"half": "f16", "float": "f32", "double": "f64"}.get(str(kind), str(kind))


def is_same_index(one: Index, other: Index) -> bool:
    """Whether two numbers are known to be equal."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return one is other


class FunctionBuilder:
    """Builds one function of the kernel's module. Its first parameter is always the core.

    `can_suspend` tells a coroutine from a function that runs to its end. A function that fails
    leaves through `failure()`: a coroutine finishes its core, any other function returns a true
    flag in front of its results.
    """

    def __init__(
        self,
        module: ir.Module,
        name: str,
        parameters: Sequence[ir.Type] = (),
        results: Sequence[ir.Type] = (),
        *,
        is_program: bool = False,
        can_suspend: bool = False,
        offsets: dict[str, int],
    ):
        self.module = module
        self.offsets = offsets
        self.is_program = is_program
        self.can_suspend = can_suspend
        self.results = tuple(results)
        if is_program:
            result_type = pointer if can_suspend else void
        else:
            result_type = ir.LiteralStructType([i1, *results])
        self.function = ir.Function(
            module,
            ir.FunctionType(result_type, [pointer, *parameters]),
            module.get_unique_name(name),
        )
        if is_program:
            self.function.linkage = "external"
        else:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
        # Kept apart from the code: what every part of the function may use lives here and dominates
        # it all.
        self.entry = self.function.append_basic_block("entry")
        self.entry_builder = ir.IRBuilder(self.entry)
        self.builder = ir.IRBuilder(self.function.append_basic_block("body"))
        self.first_block = self.builder.block
        self.core = self.function.args[0]
        self.core.name = "core"
        self.parameters = self.function.args[1:]
        self.loop_count = 0
        # Where the function looks whether the launch has been told to stop, by identity.
        self.stops: set[int] = set()
        self._entry_values: dict[object, ir.Value] = {}
        self._failure_block: ir.Block | None = None
        self._handle: ir.Value | None = None
        self._end_block: ir.Block | None = None
        if can_suspend:
            self._begin_coroutine()

    def sibling(
        self, name: str, parameters: Sequence[ir.Type], results: Sequence[ir.Type] = ()
    ) -> "FunctionBuilder":
        """Begins another function of the module, which runs to its end."""
        return FunctionBuilder(self.module, name, parameters, results, offsets=self.offsets)

    @property
    def can_fail(self) -> bool:
        """Whether the function built so far has a way to fail."""
        return self._failure_block is not None

    # Leaving the function.

    def failure(self) -> ir.Block:
        """The block to branch to once a failure has been recorded."""
        if self._failure_block is None:
            self._failure_block = self.function.append_basic_block("failure")
            builder = ir.IRBuilder(self._failure_block)
            if self.is_program:
                self._emit_finish(builder)
            else:
                failed = ir.Constant(self.function.function_type.return_type, ir.Undefined)
                builder.ret(builder.insert_value(failed, ir.Constant(i1, 1), 0))
        return self._failure_block

    def finish(self, results: Sequence[ir.Value] = ()) -> ir.Function:
        """Ends the function: returns the results, or for a program reports that the core has
        finished.
        """
        if self.is_program:
            self._emit_finish(self.builder)
        else:
            value: ir.Value = ir.Constant(self.function.function_type.return_type, ir.Undefined)
            value = self.builder.insert_value(value, ir.Constant(i1, 0), 0)
            for position, result in enumerate(results):
                value = self.builder.insert_value(value, result, position + 1)
            self.builder.ret(value)
        self.entry_builder.branch(self.first_block)
        return self.function

    def _emit_finish(self, builder: ir.IRBuilder) -> None:
        builder.call(self.external("cokernel_finish", void, [pointer]), [self.core])
        if self.can_suspend:
            builder.branch(self._coroutine_end())
        else:
            builder.ret_void()

    # The coroutine.

    def _begin_coroutine(self) -> None:
        # llvmlite refuses attributes it has no name for, this one among them.
        set.add(self.function.attributes, "presplitcoroutine")
        builder = self.entry_builder
        null = ir.Constant(pointer, None)
        identity = builder.call(
            self.external("llvm.coro.id", token, [i32, pointer, pointer, pointer]),
            [ir.Constant(i32, 64), null, null, null],
        )
        size = builder.call(self.external("llvm.coro.size.i64", i64, []), [])
        frame = builder.call(
            self.external("cokernel_frame", pointer, [pointer, i64]), [self.core, size]
        )
        self._handle = builder.call(
            self.external("llvm.coro.begin", pointer, [token, pointer]), [identity, frame]
        )
        # See Core::handle: the store is what keeps spills in front of the calls that publish the
        # core.
        builder.store(self._handle, self.field(self.core, "Core.handle", builder))

    def _coroutine_end(self) -> ir.Block:
        if self._end_block is None:
            self._end_block = self.function.append_basic_block("coroutine_end")
            builder = ir.IRBuilder(self._end_block)
            builder.call(
                self.external("llvm.coro.end", void, [pointer, i1, token]),
                [self._handle, ir.Constant(i1, 0), ir.Constant(token, "none")],
            )
            builder.ret(self._handle)
        return self._end_block

    def suspend_unless(self, emit_call: Callable[[], ir.Value | None]) -> None:
        """Emits a call that may publish the core as a waiter, and suspends if it returned 0 (or
        returns nothing).

        The resume point is saved in front of the call, because another worker may resume the core
        while the call returns.
        """
        if not self.can_suspend:
            raise AssertionError("only a coroutine suspends; analysis.py knows where it may")
        builder = self.builder
        saved = builder.call(self.external("llvm.coro.save", token, [pointer]), [self._handle])
        proceed = emit_call()
        resumed = self.function.append_basic_block("resumed")
        if proceed is not None:
            suspend = self.function.append_basic_block("suspend")
            builder.cbranch(
                builder.icmp_signed("!=", proceed, ir.Constant(i32, 0)), resumed, suspend
            )
            builder.position_at_end(suspend)
        outcome = builder.call(
            self.external("llvm.coro.suspend", i8, [token, i1]), [saved, ir.Constant(i1, 0)]
        )
        end = self._coroutine_end()
        switch = builder.switch(outcome, end)
        switch.add_case(ir.Constant(i8, 0), resumed)
        switch.add_case(ir.Constant(i8, 1), end)
        builder.position_at_end(resumed)

    # Names from outside the function.

    def external(self, name: str, result: ir.Type, parameters: Sequence[ir.Type]) -> ir.Function:
        """Declares a function of the runtime, of LLVM or of a library, once per module."""
        existing = self.module.globals.get(name)
        if existing is not None:
            return existing
        return ir.Function(self.module, ir.FunctionType(result, list(parameters)), name)

    def call_external(self, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
        """Calls a function of the runtime or of a library, declaring it if need be."""
        callee = self.external(name, result, [argument.type for argument in arguments])
        return self.builder.call(callee, list(arguments))

    def intrinsic(
        self,
        name: str,
        result: ir.Type,
        arguments: Sequence[ir.Value],
        *,
        overloads: Sequence[ir.Type] | None = None,
    ) -> ir.Value:
        """Calls an overloaded LLVM intrinsic; it is overloaded on the result's type unless
        `overloads` says otherwise.
        """
        suffixes = [type_suffix(kind) for kind in ([result] if overloads is None else overloads)]
        return self.call_external(".".join([name, *suffixes]), result, arguments)

    def constant_data(self, kind: ir.Type, values: Sequence[int | float]) -> ir.Value:
        """A private read-only table in the module; returns a pointer to it."""
        table_type = ir.ArrayType(kind, len(values))
        table = ir.GlobalVariable(self.module, table_type, self.module.get_unique_name("table"))
        table.linkage, table.global_constant, table.unnamed_addr = "private", True, True
        table.align = 64
        table.initializer = ir.Constant(table_type, list(values))
        return table

    # The core and the launch.

    def field(self, base: ir.Value, name: str, builder: ir.IRBuilder | None = None) -> ir.Value:
        """The address of a field that the runtime describes by its offset: "Core.memory"."""
        return self.advance(base, self.offsets[name], builder)

    def core_field(self, name: str, kind: ir.Type) -> ir.Value:
        """A field of this core that stays the same during a launch, loaded once at the entry of the
        function.
        """
        return self.at_entry(
            name,
            lambda builder: self.load_invariant(
                self.field(self.core, name, builder), kind, builder
            ),
        )

    def at_entry(self, key: object, emit: Callable[[ir.IRBuilder], ir.Value]) -> ir.Value:
        """A value computed in the entry block, and only once for the same key."""
        if key not in self._entry_values:
            self._entry_values[key] = emit(self.entry_builder)
        return self._entry_values[key]

    def load_invariant(
        self, address: ir.Value, kind: ir.Type, builder: ir.IRBuilder | None = None
    ) -> ir.Value:
        """Loads what nobody writes during the launch, so that LLVM may move and share the load."""
        value = (builder or self.builder).load(address, typ=kind)
        value.set_metadata("invariant.load", self.module.add_metadata([]))
        return value

    # Index arithmetic, folded while it is constant.

    def index(self, value: Index) -> ir.Value:
        """The index as an i64 value."""
        return ir.Constant(i64, value) if isinstance(value, int) else value

    def add(self, left: Index, right: Index) -> Index:
        if isinstance(left, int) and isinstance(right, int):
            return left + right
        if left == 0 and isinstance(left, int):
            return right
        if right == 0 and isinstance(right, int):
            return left
        return self.builder.add(self.index(left), self.index(right), flags=["nsw"])

    def subtract(self, left: Index, right: Index) -> Index:
        if isinstance(left, int) and isinstance(right, int):
            return left - right
        if right == 0 and isinstance(right, int):
            return left
        return self.builder.sub(self.index(left), self.index(right), flags=["nsw"])

    def multiply(self, left: Index, right: Index) -> Index:
        if isinstance(left, int) and isinstance(right, int):
            return left * right
        for one, other in ((left, right), (right, left)):
            if isinstance(one, int) and one in (0, 1):
                return other if one else 0
        return self.builder.mul(self.index(left), self.index(right), flags=["nsw"])

    def divide(self, left: Index, right: int) -> Index:
        """Division of a non-negative index by a positive constant, rounded down."""
        if isinstance(left, int):
            return left // right
        return left if right == 1 else self.builder.udiv(left, self.index(right))

    def remainder(self, left: Index, right: int) -> Index:
        """Remainder of a non-negative index by a positive constant."""
        if isinstance(left, int):
            return left % right
        return 0 if right == 1 else self.builder.urem(left, self.index(right))

    def linear_index(self, index: Sequence[Index], strides: Sequence[Index]) -> Index:
        """The sum of index times stride over the dimensions."""
        total: Index = 0
        for position, stride in zip(index, strides, strict=True):
            total = self.add(total, self.multiply(position, stride))
        return total

    def unravel(self, flat: Index, shape: Sequence[int]) -> list[Index]:
        """The row-major coordinates of a flat index in an array of static shape."""
        coordinates: list[Index] = []
        for extent in reversed(shape):
            coordinates.append(
                self.remainder(flat, extent) if len(coordinates) + 1 < len(shape) else flat
            )
            flat = self.divide(flat, extent)
        return coordinates[::-1]

    def advance(
        self, base: ir.Value, offset: Index, builder: ir.IRBuilder | None = None
    ) -> ir.Value:
        """`base` moved by `offset` bytes."""
        if isinstance(offset, int) and offset == 0:
            return base
        return (builder or self.builder).gep(
            base, [self.index(offset)], inbounds=True, source_etype=i8
        )

    # Control flow.

    def check(self, condition: ir.Value, on_failure: Callable[[], None]) -> None:
        """Leaves the function unless `condition` holds; `on_failure` emits what records the
        failure.
        """
        builder = self.builder
        bad = self.function.append_basic_block("check_failed")
        good = self.function.append_basic_block("check_passed")
        builder.cbranch(condition, good, bad).set_weights([1 << 20, 1])
        builder.position_at_end(bad)
        on_failure()
        builder.branch(self.failure())
        builder.position_at_end(good)

    def stop_check(self, site: ir.Constant | None = None) -> None:
        """Leaves the function if the launch has been told to stop (time limit, Ctrl-C, another
        core's failure), and notes where the core has been, if `site` says so.
        """
        launch = self.core_field("Core.launch", pointer)
        flag = self.at_entry("stop", lambda builder: self.field(launch, "Launch.stop", builder))
        # An atomic load, so that LLVM reads the flag afresh each time round a loop.
        stop = self.builder.load_atomic(flag, "monotonic", 4, typ=i32)
        running = self.function.append_basic_block("running")
        proceed = self.builder.icmp_signed("==", stop, ir.Constant(i32, 0))
        self.stops.add(id(self.builder.block))
        leaving = self.failure()
        if site is not None:
            leaving = self.function.append_basic_block("left_loop")
            builder = ir.IRBuilder(leaving)
            place = self.field(self.core, "Core.site", builder)
            # Others read it only once this core has left.
            builder.store(site, place, align=4)
            builder.branch(self.failure())
        self.builder.cbranch(proceed, running, leaving).set_weights([1 << 20, 1])
        self.builder.position_at_end(running)

    @contextlib.contextmanager
    def loop(
        self,
        start: Index,
        stop: Index,
        *,
        step: Index = 1,
        carry: Sequence[ir.Value] = (),
        rolled: bool = False,
    ) -> Iterator["Loop"]:
        """A counted loop, ascending; the body runs for start <= i < stop.

        Carried values go in `loop.carry` and come back through `loop.next`; after the loop
        `loop.carry` holds their last values. `rolled` forbids LLVM to unroll the loop: of a loop
        over elements that LLVM vectorises, unrolling only makes code that takes long to compile.
        Where the body is a long chain of arithmetic, LLVM is told to take two vectors at once: it
        takes one, and the processor then waits for results more than it needs to.
        """
        builder = self.builder
        header = self.function.append_basic_block("loop")
        body = self.function.append_basic_block("loop_body")
        done = self.function.append_basic_block("loop_done")
        before = builder.block
        builder.branch(header)
        builder.position_at_end(header)
        counter = builder.phi(i64)
        counter.add_incoming(self.index(start), before)
        phis = []
        for value in carry:
            phi = builder.phi(value.type)
            phi.add_incoming(value, before)
            phis.append(phi)
        builder.cbranch(builder.icmp_signed("<", counter, self.index(stop)), body, done)
        builder.position_at_end(body)
        loop = Loop(counter, phis)
        yield loop
        if len(loop.next) != len(phis):
            raise AssertionError("a loop body must give each carried value its next one")
        following = builder.add(counter, self.index(step), flags=["nsw"])
        counter.add_incoming(following, builder.block)
        for phi, value in zip(phis, loop.next, strict=True):
            phi.add_incoming(value, builder.block)
        latch = builder.branch(header)
        if rolled:
            # With something carried, LLVM takes several vectors by itself.
            is_chain = builder.block is body and not carry
            is_long = is_chain and len(body.instructions) in LONG_LOOP_INSTRUCTIONS
            latch.set_metadata("llvm.loop", self._rolled_metadata(vectors=2 if is_long else None))
        builder.position_at_end(done)

    def _rolled_metadata(self, vectors: int | None) -> ir.MDValue:
        """What tells LLVM not to unroll a loop and, if given, how many vectors to take at once."""

        def string(text: str) -> ir.MetaDataString:
            return ir.MetaDataString(self.module, text)

        hints = [self.module.add_metadata([string("llvm.loop.unroll.disable")])]
        if vectors is not None:
            count = string("llvm.loop.interleave.count")
            hints.append(self.module.add_metadata([count, ir.Constant(i32, vectors)]))
        # The first operand of a loop's metadata must be the metadata itself; a string of its own
        # keeps llvmlite from sharing it between loops until then.
        name = f"{self.function.name}.{len(self.module.metadata)}"
        identity = self.module.add_metadata([*hints, string(name)])
        identity.operands = (identity, *hints)
        return identity

    @contextlib.contextmanager
    def nest(self, shape: Sequence[Index], *, work: int = 1) -> Iterator[list[Index]]:
        """A nest of loops over all points of a box, last dimension innermost; dimensions of extent
        one get no loop. `work` says for how many elements each point stands.

        A long nest looks every so often whether the launch has been told to stop.
        """
        watched = _watched_dimension(shape, work)
        with contextlib.ExitStack() as stack:
            index: list[Index] = []
            for dimension, extent in enumerate(shape):
                if isinstance(extent, int) and extent == 1:
                    index.append(0)
                    continue
                start, stop = 0, extent
                if dimension == watched:
                    # Blocks, so that the loops inside a block are as simple as ever.
                    inside = work * math.prod(_known(shape[dimension + 1 :]))
                    step = max(1, WATCHED_ELEMENTS // inside)
                    block = stack.enter_context(self.loop(0, extent, step=step))
                    self.stop_check()
                    if step == 1:
                        index.append(block.counter)
                        continue
                    start = block.counter
                    stop = self.add(start, step)
                    if not isinstance(extent, int) or extent % step:
                        limits = [self.index(stop), self.index(extent)]
                        stop = self.intrinsic("llvm.umin", i64, limits)
                loop = stack.enter_context(self.loop(start, stop, rolled=True))
                index.append(loop.counter)
            yield index


def _known(extents: Sequence[Index]) -> list[int]:
    """The extents that are known, 1 in place of each of the others."""
    return [extent if isinstance(extent, int) else 1 for extent in extents]


def _watched_dimension(shape: Sequence[Index], work: int) -> int | None:
    """The innermost dimension inside of which a block of a long nest fits; None if the nest is
    short, as far as that is known."""
    extents = _known(shape)
    if work * math.prod(extents) < LONG_NEST_ELEMENTS:
        return None
    inside = work
    for dimension in reversed(range(len(shape))):
        inside *= extents[dimension]
        if inside > WATCHED_ELEMENTS:
            return dimension
    return None


class Loop:
    """The inside of a counted loop: the counter, what it carries, and what the body hands to the
    next iteration.
    """

    def __init__(self, counter: ir.Value, carry: list[ir.Value]):
        self.counter = counter
        self.carry = carry
        self.next: list[ir.Value] = []


class ElementBuilder:
    """Emits arithmetic on one element, or on `count` elements at once: rules are written once for
    both.
    """

    def __init__(self, function: FunctionBuilder, count: int = 1):
        self.function = function
        self.builder = function.builder
        self.count = count
        # Elements of shared subexpressions, so that a value used twice at the same index is
        # computed once.
        self.memo: dict[object, ir.Value] = {}

    def type(self, scalar: ir.Type) -> ir.Type:
        """The scalar type, or the vector of as many lanes as this builder works on."""
        return dtypes.lanes(scalar, self.count)

    def constant(self, scalar: ir.Type, value: int | float) -> ir.Constant:
        """A constant in every lane."""
        if self.count == 1:
            return ir.Constant(scalar, value)
        return ir.Constant(ir.VectorType(scalar, self.count), [value] * self.count)

    def splat(self, value: ir.Value) -> ir.Value:
        """A scalar repeated in every lane."""
        if self.count == 1 or isinstance(value.type, ir.VectorType):
            return value
        if isinstance(value, ir.Constant):
            return ir.Constant(ir.VectorType(value.type, self.count), [value.constant] * self.count)
        vector = ir.VectorType(value.type, self.count)
        first = self.builder.insert_element(
            ir.Constant(vector, ir.Undefined), value, ir.Constant(i32, 0)
        )
        mask = ir.Constant(ir.VectorType(i32, self.count), [0] * self.count)
        return self.builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)

    def intrinsic(
        self, name: str, result: ir.Type, arguments: Sequence[ir.Value], **options: Any
    ) -> ir.Value:
        """An overloaded LLVM intrinsic on all lanes."""
        return self.function.intrinsic(name, result, arguments, **options)
