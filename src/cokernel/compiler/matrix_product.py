"""Matrix products of float32 and bfloat16 as loops over panels, for processors with vectors of 512
bits.

The scheme is that of BLIS (Van Zee and van de Geijn): a block of the right matrix is copied into
panels of 32 columns, which stay in the first-level cache, and a block of the left one into rows
without gaps, which stays in the second-level cache; a kernel in registers multiplies a few rows
with a panel. Copying also turns transposed matrices the right way round and widens bfloat16, so
that no operand is ever copied for anything else.

Everything is counted in words of 32 bits: a float32, or two bfloat16 that follow each other along
the summed dimension where the processor multiplies such pairs, or a bfloat16 widened to a float32
where it does not.
"""

import dataclasses
import enum
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir

from cokernel.compiler import codegen
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import f32, i1, i16, i32, i64, pointer, void
from cokernel.compiler.function import FunctionBuilder, Index
from cokernel.compiler.values import Buffer

LANES = 16
WORD = 4
VECTOR_BYTES = LANES * WORD
# A panel has two vectors of columns. With so many rows at a time the sums take 28 of 32 registers.
PANEL_VECTORS = 2
PANEL_COLUMNS = PANEL_VECTORS * LANES
MOST_ROWS = 14
# A panel of so many words along the summed dimension has 32 KiB; so many groups of rows, 252 KiB.
BLOCK_WORDS = 256
BLOCK_GROUPS = 18
BLOCK_COLUMNS = 1024
# So many words of all columns are copied before the next ones.
STRIP_WORDS = 8
# Between rows of the copy lie a few words, so that they do not all fall into the same few lines of
# the cache.
ROW_GAP = LANES
# Smaller products are left to others: copying would cost more than it brings.
LEAST = (8, 16, 16)

FLOATS = ir.VectorType(f32, LANES)
WORDS = ir.VectorType(i32, LANES)
HALVES = ir.VectorType(i16, LANES)
PAIRS = ir.VectorType(i16, 2 * LANES)


class Form(enum.Enum):
    """What a word is made of."""

    FLOAT32 = "float32"
    WIDENED = "widened bfloat16"
    PAIRS = "pairs of bfloat16"


def form_of(dtype: Any) -> Form | None:
    """How matrices of a dtype are multiplied on this machine, None if not here."""
    if not codegen.host_has("avx512f"):
        return None
    if np.dtype(dtype) == np.float32:
        return Form.FLOAT32
    if np.dtype(dtype) == ml_dtypes.bfloat16:
        return Form.PAIRS if codegen.host_has("avx512bf16") else Form.WIDENED
    return None


def is_worthwhile(m: int, k: int, n: int) -> bool:
    """Whether a product of (m, k) and (k, n) elements is large enough."""
    return all(size >= least for size, least in zip((m, k, n), LEAST, strict=True))


def is_readable(matrices: Buffer) -> bool:
    """Whether rows or columns of a stack of matrices lie without gaps inside."""
    return 1 in matrices.strides[1:] and min(matrices.strides[1:]) >= 1


def round_up(size: int, multiple: int = LANES) -> int:
    """The smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class _Operand:
    """How an operand lies in memory: whether across the summed dimension, or along it, and how many
    elements there are from one such line to the next."""

    step: int
    is_across: bool


@dataclasses.dataclass(frozen=True)
class _Product:
    """What the functions of a product depend on."""

    form: Form
    m: int
    k: int
    n: int
    left: _Operand
    right: _Operand
    target_step: int
    add: bool

    @property
    def per_word(self) -> int:
        """How many elements along the summed dimension share a word."""
        return 2 if self.form is Form.PAIRS else 1

    @property
    def element_bytes(self) -> int:
        return 4 if self.form is Form.FLOAT32 else 2

    @property
    def summed_words(self) -> int:
        return -(-self.k // self.per_word)

    @property
    def block_words(self) -> int:
        """The words along the summed dimension that a block may have, in whole vectors."""
        return min(BLOCK_WORDS, round_up(self.summed_words))

    @property
    def regions(self) -> list[tuple[int, int, int]]:
        """The rows in groups of nearly equal size: first row, number of groups, rows of each."""
        groups = -(-self.m // MOST_ROWS)
        rows, more = divmod(self.m, groups)
        regions = [(0, more, rows + 1), (more * (rows + 1), groups - more, rows)]
        return [region for region in regions if region[1]]

    @property
    def panel_vectors(self) -> list[int]:
        """How many vectors of columns a panel may have."""
        last = -(-(self.n % PANEL_COLUMNS) // LANES) or PANEL_VECTORS
        return sorted({last, PANEL_VECTORS if self.n > PANEL_COLUMNS else last})

    @property
    def block_rows(self) -> int:
        """How many rows of the left matrix are copied at a time, at most."""
        return max(min(count, BLOCK_GROUPS) * rows for _, count, rows in self.regions)

    @property
    def left_step(self) -> int:
        """The words between lines of the copied block of the left matrix."""
        return ROW_GAP + (round_up(self.block_rows) if self.left.is_across else self.block_words)

    @property
    def left_bytes(self) -> int:
        """The room for the copied block of the left matrix."""
        lines = self.block_words if self.left.is_across else self.block_rows
        return lines * self.left_step * WORD

    @property
    def panel_bytes(self) -> int:
        return self.block_words * PANEL_COLUMNS * WORD

    @property
    def right_bytes(self) -> int:
        """The room for the panels of a block of the right matrix."""
        return (
            round_up(min(self.n, BLOCK_COLUMNS), PANEL_COLUMNS)
            // PANEL_COLUMNS
            * (self.panel_bytes)
        )


def multiply(
    context: Context, form: Form, target: Buffer, left: Buffer, right: Buffer, *, add: bool
) -> None:
    """Emits target = left @ right, or target += left @ right, for stacks of matrices: float32
    (batch, m, n), and (batch, m, k) and (batch, k, n) in the dtype of the form.

    The operands are as `is_readable` wants them, the columns of the target lie side by side, and
    the target overlaps no operand.
    """
    batch, m, k = left.shape
    n = right.shape[2]
    lies = (_operand(*left.strides[1:]), _operand(*reversed(right.strides[1:])))
    product = _Product(form, m, k, n, *lies, target.strides[1], add)
    arena = context.program.arena
    rooms = [arena.allocate(product.left_bytes), arena.allocate(product.right_bytes)]
    loop = context.function.sibling("products", [pointer] * 5)
    inside = [
        dataclasses.replace(buffer, address=parameter)
        for buffer, parameter in zip((target, left, right), loop.parameters, strict=False)
    ]
    with loop.nest([batch]) as index:
        places = [buffer.element_address(loop, [*index, 0, 0]) for buffer in inside]
        one = _function(context, loop, product)
        loop.builder.call(one.function, [loop.core, *places, *loop.parameters[3:]])
    loop.finish()
    addresses = [context.private_address(room.offset) for room in rooms]
    context.call(loop, [target.address, left.address, right.address, *addresses])


def _operand(line: int, inside: int) -> _Operand:
    """An operand, given its strides from one row (or column) to the next and inside of it."""
    return _Operand(line, False) if inside == 1 else _Operand(inside, True)


def _function(context: Context, caller: FunctionBuilder, product: _Product) -> FunctionBuilder:
    """The function that computes one product; products that are alike share it."""
    functions = context.kernel.shared_functions
    if product not in functions:
        functions[product] = _Loops(context, caller, product).emit()
    return functions[product]


class _Loops:
    """Emits the loops over blocks and panels."""

    def __init__(self, context: Context, caller: FunctionBuilder, product: _Product):
        self.context = context
        self.caller = caller
        self.product = product

    def emit(self) -> FunctionBuilder:
        """A function of target, left, right, and the rooms for a block of the left and the right
        matrix."""
        product = self.product
        copy_left, copy_right = self._copy_left(), self._copy_right()
        kernels = {
            (rows, vectors): self._kernel(rows, vectors)
            for _, _, rows in product.regions
            for vectors in product.panel_vectors
        }
        function = self.caller.sibling("product", [pointer] * 5)
        target, left, right, left_room, right_room = function.parameters

        def call(callee: FunctionBuilder, *arguments: Index | ir.Value) -> None:
            values = [function.index(argument) for argument in arguments]
            function.builder.call(callee.function, [function.core, *values])

        with (
            function.loop(0, product.n, step=BLOCK_COLUMNS) as columns_loop,
            function.loop(0, product.summed_words, step=BLOCK_WORDS) as words_loop,
        ):
            column, word = columns_loop.counter, words_loop.counter
            columns = _least(function, BLOCK_COLUMNS, function.subtract(product.n, column))
            steps = _least(function, BLOCK_WORDS, function.subtract(product.summed_words, word))
            element = function.multiply(word, product.per_word)
            rest = function.subtract(product.k, element)
            source = self._at(function, right, product.right, element, column)
            call(copy_right, source, right_room, columns, steps, rest)
            adds = function.builder.icmp_signed("!=", word, ir.Constant(i64, 0))
            if product.add:
                adds = ir.Constant(i1, 1)
            for first, count, rows in product.regions:
                with function.loop(0, count, step=BLOCK_GROUPS) as block:
                    groups = _least(function, BLOCK_GROUPS, function.subtract(count, block.counter))
                    row = function.add(first, function.multiply(block.counter, rows))
                    source = self._at(function, left, product.left, element, row)
                    call(copy_left, source, left_room, function.multiply(groups, rows), steps, rest)
                    with (
                        function.loop(0, columns, step=PANEL_COLUMNS) as panel,
                        function.loop(0, groups) as group,
                    ):
                        offset = function.multiply(
                            function.divide(panel.counter, PANEL_COLUMNS), product.panel_bytes
                        )
                        line = WORD * (1 if product.left.is_across else product.left_step)
                        inner_row = function.multiply(group.counter, rows)
                        to = function.linear_index(
                            [function.add(row, inner_row), function.add(column, panel.counter)],
                            [product.target_step * WORD, WORD],
                        )
                        wide = function.subtract(columns, panel.counter)
                        arguments = [
                            function.core,
                            function.advance(left_room, function.multiply(inner_row, line)),
                            function.advance(right_room, offset),
                            function.advance(target, to),
                            function.index(steps),
                            function.index(wide),
                            adds,
                        ]
                        self._call_kernel(function, kernels, rows, wide, arguments)
        function.finish()
        return function

    def _call_kernel(
        self,
        function: FunctionBuilder,
        kernels: dict[tuple[int, int], FunctionBuilder],
        rows: int,
        wide: Index,
        arguments: list[ir.Value],
    ) -> None:
        """Calls the kernel that is just wide enough."""
        builder = function.builder
        narrow, *more = self.product.panel_vectors
        if not more:
            builder.call(kernels[rows, narrow].function, arguments)
            return
        limit = ir.Constant(i64, narrow * LANES)
        is_narrow = builder.icmp_signed("<=", function.index(wide), limit)
        with builder.if_else(is_narrow) as branches:
            for branch, vectors in zip(branches, (narrow, *more), strict=True):
                with branch:
                    builder.call(kernels[rows, vectors].function, arguments)

    def _at(
        self,
        function: FunctionBuilder,
        base: ir.Value,
        operand: _Operand,
        element: Index,
        line: Index,
    ) -> ir.Value:
        """The address of an element along the summed dimension in a row or column."""
        steps = [operand.step, 1] if operand.is_across else [1, operand.step]
        offset = function.linear_index([element, line], steps)
        return function.advance(base, function.multiply(offset, self.product.element_bytes))

    # Copying.

    def _copy_left(self) -> FunctionBuilder:
        """A function of source, room, rows, words and elements along the summed dimension."""
        product = self.product
        function = self.caller.sibling("copy_left", [pointer, pointer, i64, i64, i64])
        source, room, rows, steps, rest = function.parameters
        if product.left.is_across:
            with (
                function.loop(0, steps) as word,
                function.loop(0, rows, step=LANES) as row,
            ):
                element = function.multiply(word.counter, product.per_word)
                origin = self._at(function, source, product.left, element, row.counter)
                loaded = self._load_across(
                    function,
                    origin,
                    product.left,
                    function.subtract(rows, row.counter),
                    function.subtract(rest, element),
                )
                place = function.linear_index(
                    [word.counter, row.counter], [product.left_step * WORD, WORD]
                )
                function.builder.store(loaded, function.advance(room, place), align=WORD)
        else:
            with (
                function.loop(0, rows) as row,
                function.loop(0, steps, step=LANES) as word,
            ):
                element = function.multiply(word.counter, product.per_word)
                origin = self._at(function, source, product.left, element, row.counter)
                loaded = self._load_along(function, origin, function.subtract(rest, element))
                place = function.linear_index(
                    [row.counter, word.counter], [product.left_step * WORD, WORD]
                )
                function.builder.store(loaded, function.advance(room, place), align=WORD)
        function.finish()
        return function

    def _copy_right(self) -> FunctionBuilder:
        """A function of source, room, columns, words and elements along the summed dimension."""
        product = self.product
        function = self.caller.sibling("copy_right", [pointer, pointer, i64, i64, i64])
        source, room, columns, steps, rest = function.parameters
        # A few lines of the source at a time, along all panels, as the processor foresees best.
        height, step = (STRIP_WORDS, 1) if product.right.is_across else (LANES, LANES)
        with (
            function.loop(0, steps, step=height) as strip,
            function.loop(0, columns, step=PANEL_COLUMNS) as panel,
        ):
            index = function.divide(panel.counter, PANEL_COLUMNS)
            to = function.advance(room, function.multiply(index, product.panel_bytes))
            end = _least(function, steps, function.add(strip.counter, height))
            with function.loop(strip.counter, end, step=step) as word:
                element = function.multiply(word.counter, product.per_word)
                left_over = function.subtract(rest, element)
                for number in range(PANEL_VECTORS):
                    column = function.add(panel.counter, number * LANES)
                    wide = function.subtract(columns, column)
                    if product.right.is_across:
                        origin = self._at(function, source, product.right, element, column)
                        loaded = [
                            self._load_across(function, origin, product.right, wide, left_over)
                        ]
                    else:
                        last = function.subtract(columns, 1)
                        origins = [
                            self._at(
                                function,
                                source,
                                product.right,
                                element,
                                # What is behind the last column is computed but never stored.
                                _least(function, function.add(column, lane), last),
                            )
                            for lane in range(LANES)
                        ]
                        loaded = transposed(
                            function,
                            [self._load_along(function, item, left_over) for item in origins],
                        )
                    for lane, register in enumerate(loaded):
                        place = function.linear_index(
                            [function.add(word.counter, lane), number * LANES],
                            [PANEL_COLUMNS * WORD, WORD],
                        )
                        function.builder.store(register, function.advance(to, place), align=WORD)
        function.finish()
        return function

    def _load_along(self, function: FunctionBuilder, address: ir.Value, rest: Index) -> ir.Value:
        """A vector of words from elements that follow each other along the summed dimension, zeros
        behind the last of `rest` elements."""
        match self.product.form:
            case Form.FLOAT32:
                return _load_first(function, WORDS, address, rest)
            case Form.WIDENED:
                return _widened(function, _load_first(function, HALVES, address, rest))
            case Form.PAIRS:
                loaded = _load_first(function, PAIRS, address, rest)
                return function.builder.bitcast(loaded, WORDS)

    def _load_across(
        self,
        function: FunctionBuilder,
        address: ir.Value,
        operand: _Operand,
        wide: Index,
        rest: Index,
    ) -> ir.Value:
        """A vector of words of as many neighbouring lines, of which there are `wide`."""
        match self.product.form:
            case Form.FLOAT32:
                return _load_first(function, WORDS, address, wide)
            case Form.WIDENED:
                return _widened(function, _load_first(function, HALVES, address, wide))
            case Form.PAIRS:
                builder = function.builder
                low = _load_first(function, HALVES, address, wide)
                if self.product.k % 2:
                    # The last pair lacks its second element.
                    is_whole = builder.icmp_signed(">", function.index(rest), ir.Constant(i64, 1))
                    wide = builder.select(is_whole, function.index(wide), ir.Constant(i64, 0))
                following = function.advance(address, 2 * operand.step)
                high = _load_first(function, HALVES, following, wide)
                return builder.or_(builder.zext(low, WORDS), _widened(function, high))

    # The kernel.

    def _kernel(self, rows: int, vectors: int) -> FunctionBuilder:
        """A function of the addresses of rows, panel and target, the number of words to sum over,
        how many columns there are, and whether to add to the target."""
        product = self.product
        function = self.caller.sibling(
            f"multiply_{rows}x{vectors * LANES}", [pointer, pointer, pointer, i64, i64, i1]
        )
        left, panel, target, steps, wide, adds = function.parameters
        builder = function.builder
        between, onward = product.left_step * WORD, WORD
        if product.left.is_across:
            between, onward = onward, between
        zero = ir.Constant(FLOATS, None)
        sums = [zero] * (rows * vectors)
        with function.loop(0, steps, carry=[left, panel, *sums], rolled=True) as loop:
            at, to, *sums = loop.carry
            columns = [
                builder.load(
                    function.advance(to, number * VECTOR_BYTES), typ=WORDS, align=VECTOR_BYTES
                )
                for number in range(vectors)
            ]
            following = []
            for row in range(rows):
                word = builder.load(function.advance(at, row * between), typ=i32, align=WORD)
                repeated = _splat(function, word, WORDS)
                for number in range(vectors):
                    following.append(
                        self._multiply_add(
                            function, repeated, columns[number], sums[row * vectors + number]
                        )
                    )
            loop.next = [
                function.advance(at, onward),
                function.advance(to, PANEL_COLUMNS * WORD),
                *following,
            ]
        sums = loop.carry[2:]
        mask = _mask(function, LANES, function.subtract(wide, (vectors - 1) * LANES))
        overloads = [FLOATS, pointer]
        with builder.if_else(adds) as branches:
            for branch, is_adding in zip(branches, (True, False), strict=True):
                with branch:
                    for row in range(rows):
                        for number in range(vectors):
                            value = sums[row * vectors + number]
                            place = row * product.target_step * WORD + number * VECTOR_BYTES
                            address = function.advance(target, place)
                            is_last = number == vectors - 1
                            if is_adding:
                                before = (
                                    function.intrinsic(
                                        "llvm.masked.load",
                                        FLOATS,
                                        [address, mask, zero],
                                        overloads=overloads,
                                    )
                                    if is_last
                                    else builder.load(address, typ=FLOATS, align=WORD)
                                )
                                value = builder.fadd(before, value)
                            if is_last:
                                function.intrinsic(
                                    "llvm.masked.store",
                                    void,
                                    [value, address, mask],
                                    overloads=overloads,
                                )
                            else:
                                builder.store(value, address, align=WORD)
        function.finish()
        return function

    def _multiply_add(
        self, function: FunctionBuilder, left: ir.Value, right: ir.Value, addend: ir.Value
    ) -> ir.Value:
        if self.product.form is Form.PAIRS:
            return function.call_external(codegen.MULTIPLY_PAIRS, FLOATS, [addend, left, right])
        left, right = (function.builder.bitcast(item, FLOATS) for item in (left, right))
        return function.intrinsic("llvm.fma", FLOATS, [left, right, addend])


def _least(function: FunctionBuilder, left: Index, right: Index) -> Index:
    if isinstance(left, int) and isinstance(right, int):
        return min(left, right)
    left, right = function.index(left), function.index(right)
    return function.intrinsic("llvm.smin", i64, [left, right])


def _splat(function: FunctionBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    undefined = ir.Constant(kind, ir.Undefined)
    first = function.builder.insert_element(undefined, value, ir.Constant(i32, 0))
    mask = ir.Constant(ir.VectorType(i32, kind.count), [0] * kind.count)
    return function.builder.shuffle_vector(first, undefined, mask)


def _mask(function: FunctionBuilder, lanes: int, count: Index) -> ir.Value:
    """The first `count` of so many lanes; none if it is negative."""
    kind = ir.VectorType(i32, lanes)
    few = function.index(_least(function, count, lanes))
    few = _splat(function, function.builder.trunc(few, i32), kind)
    return function.builder.icmp_signed("<", ir.Constant(kind, list(range(lanes))), few)


def _load_first(
    function: FunctionBuilder, kind: ir.VectorType, address: ir.Value, count: Index
) -> ir.Value:
    """The first `count` elements at an address, followed by zeros."""
    mask = _mask(function, kind.count, count)
    arguments = [address, mask, ir.Constant(kind, None)]
    return function.intrinsic("llvm.masked.load", kind, arguments, overloads=[kind, pointer])


def _widened(function: FunctionBuilder, register: ir.Value) -> ir.Value:
    """bfloat16 as the bits of float32."""
    wide = function.builder.zext(register, WORDS)
    return function.builder.shl(wide, ir.Constant(WORDS, [16] * LANES))


def transposed(function: FunctionBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """A square of words, given as its rows, transposed: by perfect shuffles of halves."""
    for _ in range(len(rows).bit_length() - 1):
        half = len(rows) // 2
        shuffled = []
        for low, high in zip(rows[:half], rows[half:], strict=True):
            for start in (0, half):
                lanes = [lane for i in range(start, start + half) for lane in (i, i + len(rows))]
                mask = ir.Constant(ir.VectorType(i32, len(lanes)), lanes)
                shuffled.append(function.builder.shuffle_vector(low, high, mask))
        rows = shuffled
    return rows
