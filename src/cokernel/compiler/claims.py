"""Claims: in checked mode, a loop tells of its accesses once and not in each iteration.

In front of a loop in which the core cannot suspend, compiled code *claims* for all its iterations
the accesses that each of them makes at an address which moves by the same step. The runtime takes
a claim only where nothing is to be found by it (`runtime/checked/claims.cc`), and then knows all of
it; otherwise it leaves everything as it is. In the loop each of these probes stands behind a branch
on the answer, so that whatever there is to find is found by the probes themselves, in their order.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from cokernel.compiler import dtypes
from cokernel.compiler.dtypes import i1, i32, i64, pointer, void
from cokernel.compiler.function import FunctionBuilder, Index
from cokernel.compiler.lines import Limit, LoopLines
from cokernel.records import record

if TYPE_CHECKING:
    from cokernel.compiler.context import Context
    from cokernel.compiler.probes import Access
    from cokernel.compiler.refs import View

# As `kClaimDimensions` in runtime/checked/claims.h.
MOST_DIMENSIONS = 3
# A loop with more accesses claims none: each claim is held against every other one.
MOST_CLAIMS = 24
# A loop known to be shorter claims nothing.
FEWEST_ITERATIONS = 4

# Reads, writes, atomic sums, and updates.
_KINDS = range(4)

# What the runtime may be called for in a loop that claims, besides the probes themselves.
_HARMLESS = frozenset(
    {
        "cokernel_checked_claimed",
        "cokernel_checked_group",
        "cokernel_checked_mark_undefined",
        "cokernel_checked_report_undefined",
        "cokernel_checked_undefined",
        "cokernel_copy",
        "cokernel_fail",
        "cokernel_fail_index",
        "cokernel_fail_picked",
    }
)


@record
class Candidate:
    """An access that may be claimed."""

    view: "View"
    access: "Access"
    site: ir.Constant
    extents: list[int]
    strides: list[int]
    itemsize: int
    # What decides whether the probe is skipped.
    branch: ir.Instruction
    # Whether elements that it has written may be made undefined afterwards.
    is_marked: bool = False


class Claims:
    """What one loop claims, while its code is emitted."""

    def __init__(self, function: FunctionBuilder):
        self.function = function
        self.candidates: list[Candidate] = []
        # The accesses that are no candidates.
        self.others: list[tuple[View, Access]] = []
        # Index checks: where they are, what is checked, and the most it may be.
        self.bounds: dict[int, tuple[ir.Value, int]] = {}
        self.last: Candidate | None = None
        self._told: tuple[View, Access] | None = None
        self._probes: set[int] = set()
        self._is_guarded = False
        self._is_lost = False
        self._group = 0
        self._flag: ir.Value | None = None
        self._before = function.function.append_basic_block("claims")
        function.builder.branch(self._before)
        function.builder.position_at_end(self._before)
        self._first = len(function.function.blocks)

    # While the body is emitted.

    @contextlib.contextmanager
    def telling(self, view: "View", access: "Access") -> Iterator[None]:
        """Says what the probes are about that are emitted within."""
        outer, self._told = self._told, (view, access)
        try:
            yield
        finally:
            self._told = outer

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        """Around probes that count as one access, which is not claimed."""
        self._group += 1
        try:
            yield
        finally:
            self._group -= 1

    def note(self, probe: ir.Value) -> None:
        """Notes a probe that has been emitted."""
        self._probes.add(id(probe))
        if self._is_guarded:
            return
        self.last = None
        if self._told is None:
            self._is_lost = True
        else:
            self.others.append(self._told)

    def is_claimed(self) -> ir.Value:
        """Whether the claims of the loop have been taken, in the loop."""
        if self._flag is None:
            self._flag = self.function.entry_builder.alloca(i1)
            # llvmlite gives it a typed pointer, which LLVM no longer has.
            self._flag.type = pointer
        return self.function.builder.load(self._flag, typ=i1)

    def guarded(
        self,
        context: "Context",
        view: "View",
        access: "Access",
        site: ir.Constant,
        block: tuple[Sequence[Index], Sequence[int]],
        tell: Callable[[], ir.Value | None],
    ) -> ir.Value | None:
        """Emits a probe, behind a branch if it may be claimed. `block` are the extents and the
        strides of what it is about.
        """
        extents, strides = block
        is_plain = all(isinstance(extent, int) for extent in extents) and 0 not in extents
        is_claimable = (
            is_plain
            and len(extents) <= MOST_DIMENSIONS
            and access.value in _KINDS
            and view.overhang is None
            and view.start is not None
            and not self._group
            and context.function is self.function
        )
        if not is_claimable:
            return tell()
        builder = context.builder
        before = builder.block
        probing = self.function.function.append_basic_block("probe")
        after = self.function.function.append_basic_block("probed")
        branch = builder.cbranch(self.is_claimed(), after, probing)
        builder.position_at_end(probing)
        self._is_guarded = True
        answer = tell()
        self._is_guarded = False
        builder.branch(after)
        builder.position_at_end(after)
        register = builder.phi(i32)
        register.add_incoming(ir.Constant(i32, 0), before)
        register.add_incoming(answer, probing)
        sizes = [int(extent) for extent in extents]
        itemsize = dtypes.itemsize(view.dtype)
        self.last = Candidate(view, access, site, sizes, list(strides), itemsize, branch)
        self.candidates.append(self.last)
        return register

    def checked_index(self, start: ir.Value, last: int, is_good: ir.Value) -> ir.Value:
        """What an index check of the loop asks for, given what it asks for without claims. Right
        before the branch of the check.
        """
        self.bounds[id(self.function.builder.block)] = (start, last)
        return self.function.builder.or_(self.is_claimed(), is_good)

    # When all of the loop has been emitted.

    def finish(self, context: "Context") -> None:
        """Emits the claims in front of the loop."""
        if self._flag is None:
            return
        blocks = self.function.function.blocks[self._first :]
        lines = LoopLines(self._before, blocks)
        is_taken: ir.Value = ir.Constant(i1, 0)
        rows = self._rows(lines, blocks)
        if rows is not None:
            is_taken = self._claim(context, lines, *rows)
        lines.builder.store(is_taken, self._flag)
        if rows is None:
            for candidate in self.candidates:
                _never(candidate)

    def _rows(
        self, lines: LoopLines, blocks: list[ir.Block]
    ) -> tuple[list[list[Index]], list[list[Index]], list[list[Index]], Index] | None:
        """The claims, what else the loop accesses, the limits, and the number of iterations; None
        if there is nothing to claim.
        """
        if self._is_lost or not self.candidates or not _calls_only(blocks, self._probes):
            return None
        trips = _trips(lines, blocks[0])
        if trips is None or (isinstance(trips, int) and trips < FEWEST_ITERATIONS):
            return None
        shape = _Shape(blocks)
        if not shape.leaves_only_at({*self.bounds, *self.function.stops}):
            return None
        for start, last in self.bounds.values():
            line = lines.of(start)
            if line is None:
                return None
            lines.limit(line, 0, last)
        rows: list[list[Index] | None] = []
        others = list(self.others)
        for candidate in self.candidates:
            row = _row(lines, candidate) if shape.always_meets(candidate.branch.parent) else None
            if row is None:
                others.append((candidate.view, candidate.access))
            rows.append(row)
        # The runtime refuses what meets these, so that the rest of the loop is claimed without it.
        met = {view.ref.memory for view, _ in others}
        claims: list[list[Index]] = []
        for candidate, row in zip(self.candidates, rows, strict=True):
            if row is not None and candidate.view.ref.memory not in met:
                claims.append(row)
                continue
            _never(candidate)
            if row is not None:
                others.append((candidate.view, candidate.access))
        ranges: dict[tuple[Index, ...], None] = {}
        for view, access in others:
            start = _start(lines, view)
            # The other kinds order what comes before and after them.
            if start is None or access.value not in _KINDS:
                return None
            ranges[(access.value, start, view.ref.nbytes)] = None
        if not 0 < len(claims) <= MOST_CLAIMS or len(ranges) > MOST_CLAIMS:
            return None
        limits = [_limit_row(limit, trips) for limit in lines.limits]
        return claims, list(map(list, ranges)), [row for row in limits if row], trips

    def _claim(
        self,
        context: "Context",
        lines: LoopLines,
        claims: list[list[Index]],
        others: list[list[Index]],
        limits: list[list[Index]],
        trips: Index,
    ) -> ir.Value:
        words = [word for row in (*claims, *others, *limits) for word in row]
        room = self.function.entry_builder.alloca(ir.ArrayType(i64, len(words)))
        # llvmlite gives it a typed pointer, which LLVM no longer has.
        room.type = pointer
        for number, word in enumerate(words):
            place = self.function.advance(room, 8 * number, lines.builder)
            lines.builder.store(lines.value(word), place)
        counts = [ir.Constant(i64, len(rows)) for rows in (claims, others, limits)]
        arguments = [self.function.core, room, *counts, lines.value(trips)]
        name = "cokernel_checked_claim"
        callee = self.function.external(name, i32, [argument.type for argument in arguments])
        answer = lines.builder.call(callee, arguments)
        return lines.builder.icmp_signed("!=", answer, ir.Constant(i32, 0))


@contextlib.contextmanager
def claiming(context: "Context", *, is_simple: bool) -> Iterator[None]:
    """Around a loop, from the block in front of its header on: claims what it accesses, if it is
    simple, which means that the core cannot suspend in it and no other loop is in it.
    """
    outer = context.claims
    may_claim = is_simple and context.kernel.checked is not None
    claims = Claims(context.function) if may_claim and not context.function.can_suspend else None
    context.claims = claims
    try:
        yield
        if claims is not None:
            claims.finish(context)
    finally:
        context.claims = outer


def before_mark(context: "Context") -> None:
    """Emits, in front of what makes elements undefined, what has the runtime take the access for
    the last one that wrote them, though it has been claimed.
    """
    claims = context.claims
    if claims is None or claims.last is None:
        return
    claims.last.is_marked = True
    function = context.function
    kind = ir.Constant(i32, claims.last.access.value)
    function.call_external(
        "cokernel_checked_claimed", void, [function.core, claims.last.site, kind]
    )


def _never(candidate: Candidate) -> None:
    """Has a probe be made after all."""
    branch: Any = candidate.branch
    branch.operands = [ir.Constant(i1, 0), *branch.operands[1:]]


def _row(lines: LoopLines, candidate: Candidate) -> list[Index] | None:
    """What the runtime is told of a claim: `ClaimWords` in runtime/checked/claims.h."""
    view = candidate.view
    address, start = lines.of(view.address), _start(lines, view)
    if address is None or start is None:
        return None
    if candidate.is_marked and isinstance(address.step, int) and address.step == 0:
        # Each iteration begins with what the one before has made of it.
        return None
    rank = len(candidate.extents)
    dimensions = [
        number for pair in zip(candidate.extents, candidate.strides, strict=True) for number in pair
    ]
    return [
        int(candidate.site.constant),
        candidate.access.value,
        int(candidate.is_marked),
        address.first,
        address.step,
        candidate.itemsize,
        start,
        view.ref.nbytes,
        rank,
        *dimensions,
        *[0] * (2 * (MOST_DIMENSIONS - rank)),
    ]


def _start(lines: LoopLines, view: "View") -> Index | None:
    """Where the Ref of a view begins, if that is the same in all iterations."""
    line = None if view.start is None else lines.of(view.start)
    return line.first if line is not None and line.is_constant else None


def _limit_row(limit: Limit, trips: Index) -> list[Index]:
    """What the runtime is told of a limit; nothing if it is known to be kept."""
    first, step = limit.line.first, limit.line.step
    if isinstance(first, int) and isinstance(step, int) and isinstance(trips, int):
        ends = (first, first + step * (trips - 1))
        if min(ends) >= limit.low and max(ends) <= limit.high:
            return []
    return [first, step, limit.low, limit.high]


def _trips(lines: LoopLines, header: ir.Block) -> Index | None:
    """How often the loop is run; not above 0 if not at all. None if that is not known."""
    branch: Any = header.terminator
    if not isinstance(branch, ir.instructions.ConditionalBranch):
        return None
    condition = branch.operands[0]
    if not isinstance(condition, ir.instructions.ICMPInstr) or condition.op != "slt":
        return None
    counter, stop = map(lines.of, condition.operands)
    if counter is None or stop is None or not stop.is_constant:
        return None
    if isinstance(counter.step, int):
        if counter.step <= 0:
            return None
        rounding: Index = counter.step - 1
    else:
        # The loop itself has seen to it that it is positive.
        rounding = lines.subtract(counter.step, 1)
    distance = lines.add(lines.subtract(stop.first, counter.first), rounding)
    if isinstance(distance, int) and isinstance(counter.step, int):
        return max(distance, 0) // counter.step
    if isinstance(counter.step, int) and counter.step == 1:
        return distance
    return lines.builder.sdiv(lines.value(distance), lines.value(counter.step))


def _calls_only(blocks: Sequence[ir.Block], probes: set[int]) -> bool:
    """Whether blocks, and the functions of the module that they call, ask nothing else of the
    runtime than what a loop that claims may ask.
    """
    waiting = list(blocks)
    seen: set[int] = set()
    while waiting:
        for instruction in waiting.pop().instructions:
            if not isinstance(instruction, ir.instructions.CallInstr):
                continue
            callee = instruction.callee
            if not isinstance(callee, ir.Function):
                return False
            if callee.blocks:
                if id(callee) not in seen:
                    seen.add(id(callee))
                    waiting += callee.blocks
            elif (
                callee.name.startswith("cokernel_")
                and callee.name not in _HARMLESS
                and id(instruction) not in probes
            ):
                return False
    return True


class _Shape:
    """How the blocks of a loop follow each other."""

    def __init__(self, blocks: list[ir.Block]):
        self._header = blocks[0]
        self._blocks = {id(block): block for block in blocks}
        before: dict[int, list[ir.Block]] = {id(block): [] for block in blocks}
        for block in blocks:
            for following in _successors(block):
                if id(following) in before:
                    before[id(following)].append(block)
        # Those that lead back to the header; the others leave the loop.
        self._live = {id(self._header)}
        waiting = [self._header]
        while waiting:
            for block in before[id(waiting.pop())]:
                if id(block) not in self._live:
                    self._live.add(id(block))
                    waiting.append(block)

    def leaves_only_at(self, allowed: set[int]) -> bool:
        """Whether the loop is left only by its header and the given blocks."""
        for number in self._live - allowed - {id(self._header)}:
            following = _successors(self._blocks[number])
            if any(id(block) not in self._live for block in following):
                return False
        return True

    def always_meets(self, wanted: ir.Block) -> bool:
        """Whether no iteration comes round without the block."""
        if wanted is self._header:
            return False
        reached = {id(wanted)}
        waiting = [block for block in _successors(self._header) if id(block) in self._live]
        while waiting:
            block = waiting.pop()
            if block is self._header:
                return False
            if id(block) in reached or id(block) not in self._live:
                continue
            reached.add(id(block))
            waiting += _successors(block)
        return True


def _successors(block: ir.Block) -> list[ir.Block]:
    terminator: Any = block.terminator
    if isinstance(terminator, ir.instructions.SwitchInstr):
        return [terminator.default, *(target for _, target in terminator.cases)]
    if terminator is None:
        return []
    return [operand for operand in terminator.operands if isinstance(operand, ir.Block)]
