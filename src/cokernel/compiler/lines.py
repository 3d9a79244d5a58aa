"""Which values of a loop grow by the same step in each iteration, read off the loop's LLVM code."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from cokernel.compiler.dtypes import i64, pointer
from cokernel.compiler.function import Index
from cokernel.records import record


@record(frozen=True)
class Line:
    """What a value is in iteration number t, counted from 0: `first + t * step`, modulo 2**64. Of
    an integer narrower than 64 bits it is the signed value, of a pointer the address.
    """

    first: Index
    step: Index

    @property
    def is_constant(self) -> bool:
        """Whether the value is the same in all iterations."""
        return isinstance(self.step, int) and self.step == 0


@record(frozen=True)
class Limit:
    """What must hold in every iteration for a line to be what the code computes."""

    line: Line
    low: int
    high: int


class LoopLines:
    """The lines of one loop. What they need is computed in front of the loop, at the end of the
    block `before`; `blocks` are those of the loop, whose header comes first.
    """

    def __init__(self, before: ir.Block, blocks: list[ir.Block]):
        self._before = before
        self._blocks = {id(block) for block in blocks}
        self._header = blocks[0]
        self.builder = ir.IRBuilder(before)
        self.builder.position_before(before.terminator)
        self._known: dict[int, Line | None] = {}
        self.limits: dict[Limit, None] = {}

    # Arithmetic in front of the loop, folded while it is constant.

    def value(self, index: Index) -> ir.Value:
        """The index as an i64 value."""
        return ir.Constant(i64, _wrapped(index)) if isinstance(index, int) else index

    def add(self, left: Index, right: Index) -> Index:
        if isinstance(left, int) and isinstance(right, int):
            return _wrapped(left + right)
        if isinstance(left, int) and left == 0:
            return right
        if isinstance(right, int) and right == 0:
            return left
        return self.builder.add(self.value(left), self.value(right))

    def subtract(self, left: Index, right: Index) -> Index:
        if isinstance(left, int) and isinstance(right, int):
            return _wrapped(left - right)
        if isinstance(right, int) and right == 0:
            return left
        return self.builder.sub(self.value(left), self.value(right))

    def multiply(self, left: Index, right: Index) -> Index:
        if isinstance(left, int) and isinstance(right, int):
            return _wrapped(left * right)
        for one, other in ((left, right), (right, left)):
            if isinstance(one, int) and one in (0, 1):
                return other if one else 0
        return self.builder.mul(self.value(left), self.value(right))

    # Lines.

    def limit(self, line: Line, low: int, high: int) -> Line:
        """The line, which must stay within limits."""
        is_known = isinstance(line.first, int) and line.is_constant
        if not is_known or not low <= int(line.first) <= high:
            self.limits[Limit(line, low, high)] = None
        return line

    def of(self, value: ir.Value) -> Line | None:
        """The line of a 64-bit or narrower integer or a pointer; None if it is none, as far as can
        be seen.
        """
        if isinstance(value, ir.Constant):
            is_number = _bits(value) is not None and isinstance(value.constant, int)
            return Line(value.constant, 0) if is_number else None
        key = id(value)
        if key not in self._known:
            # A phi that leads back to itself is no line by the way it is looked at here.
            self._known[key] = None
            self._known[key] = self._find(value)
        return self._known[key]

    def _find(self, value: ir.Value) -> Line | None:
        bits = _bits(value)
        if bits is None:
            return None
        if not isinstance(value, ir.instructions.Instruction) or not self._is_inside(value):
            return Line(self._outside(value), 0)
        if isinstance(value, ir.instructions.PhiInstr):
            return self._fits(self._of_phi(value), bits)
        rule = _RULES.get(value.opname)
        return None if rule is None else self._fits(rule(self, value), bits)

    def _is_inside(self, value: ir.instructions.Instruction) -> bool:
        return id(value.parent) in self._blocks

    def _outside(self, value: ir.Value) -> ir.Value:
        if value.type == i64:
            return value
        if _is_pointer(value):
            return self.builder.ptrtoint(value, i64)
        return self.builder.sext(value, i64)

    def _fits(self, line: Line | None, bits: int) -> Line | None:
        """The line, which must stay within what so many bits can hold."""
        if line is None or bits == 64:
            return line
        return self.limit(line, -(1 << (bits - 1)), (1 << (bits - 1)) - 1)

    def _of_phi(self, phi: ir.instructions.PhiInstr) -> Line | None:
        if phi.parent is not self._header:
            return None
        first = [value for value, block in phi.incomings if block is self._before]
        following = [value for value, block in phi.incomings if block is not self._before]
        if len(first) != 1 or len(following) != 1:
            return None
        start = self.of(first[0])
        if start is None:
            return None
        [after] = following
        if after is phi:
            return start
        if not isinstance(after, ir.instructions.Instruction) or after.opname != "add":
            return None
        others = [operand for operand in after.operands if operand is not phi]
        step = self.of(others[0]) if len(others) == 1 else None
        if step is None or not step.is_constant:
            return None
        return Line(start.first, step.first)

    def _sum(self, value: Any) -> Line | None:
        left, right = map(self.of, value.operands)
        if left is None or right is None:
            return None
        return Line(self.add(left.first, right.first), self.add(left.step, right.step))

    def _difference(self, value: Any) -> Line | None:
        left, right = map(self.of, value.operands)
        if left is None or right is None:
            return None
        return Line(self.subtract(left.first, right.first), self.subtract(left.step, right.step))

    def _product(self, value: Any) -> Line | None:
        left, right = map(self.of, value.operands)
        if left is None or right is None:
            return None
        if left.is_constant:
            left, right = right, left
        if not right.is_constant:
            return None
        factor = right.first
        return Line(self.multiply(left.first, factor), self.multiply(left.step, factor))

    def _shifted(self, value: Any) -> Line | None:
        line, by = map(self.of, value.operands)
        if line is None or by is None or not by.is_constant or not isinstance(by.first, int):
            return None
        if not 0 <= by.first < 63:
            return None
        factor = 1 << by.first
        return Line(self.multiply(line.first, factor), self.multiply(line.step, factor))

    def _same(self, value: Any) -> Line | None:
        return self.of(value.operands[0])

    def _unsigned(self, value: Any) -> Line | None:
        # Its signed and its unsigned value are the same if it is not negative.
        line = self.of(value.operands[0])
        return None if line is None else self.limit(line, 0, (1 << 63) - 1)

    def _address(self, value: Any) -> Line | None:
        if str(value.source_etype) != "i8" or len(value.indices) != 1:
            return None
        base, offset = self.of(value.pointer), self.of(value.indices[0])
        if base is None or offset is None:
            return None
        return Line(self.add(base.first, offset.first), self.add(base.step, offset.step))

    def _loaded(self, value: Any) -> Line | None:
        if "invariant.load" not in value.metadata:
            return None
        address = self.of(value.operands[0])
        if address is None or not address.is_constant:
            return None
        place = self.builder.inttoptr(self.value(address.first), pointer)
        loaded = self.builder.load(place, typ=value.type)
        loaded.set_metadata("invariant.load", value.metadata["invariant.load"])
        return Line(self._outside(loaded), 0)


_RULES: dict[str, Callable[[LoopLines, Any], Line | None]] = {
    "add": LoopLines._sum,
    "sub": LoopLines._difference,
    "mul": LoopLines._product,
    "shl": LoopLines._shifted,
    "sext": LoopLines._same,
    "trunc": LoopLines._same,
    "zext": LoopLines._unsigned,
    "getelementptr": LoopLines._address,
    "load": LoopLines._loaded,
}


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _is_pointer(value: ir.Value) -> bool:
    return isinstance(value.type, ir.PointerType)


def _bits(value: ir.Value) -> int | None:
    """How many bits the value has; None if it is no integer of 8 to 64 bits and no pointer."""
    if _is_pointer(value):
        return 64
    if isinstance(value.type, ir.IntType) and 8 <= value.type.width <= 64:
        return value.type.width
    return None
