"""Matrix products of float32 and bfloat16 as loops over panels, for processors with vectors of 512
bits, or of 256 bits and fused multiply-adds.

The scheme is that of BLIS (Van Zee and van de Geijn): a block of the right matrix is copied into
panels of two vectors of columns, which stay in the first-level cache, and a block of the left one
into rows without gaps, which stays in the second-level cache; a kernel in registers multiplies a
few rows with a panel. Copying also turns transposed matrices the right way round and widens
bfloat16, so that no operand is ever copied for anything else.

Everything is counted in words of 32 bits: a float32, or two bfloat16 that follow each other along
the summed dimension where the processor multiplies such pairs, or a bfloat16 widened to a float32
where it does not.
"""

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir

from cokernel.compiler import codegen, vector_words
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i1, i32, i64, pointer, void
from cokernel.compiler.function import FunctionBuilder, Index
from cokernel.compiler.panels import (
    BLOCK_COLUMNS,
    LINE_BYTES,
    PANEL_VECTORS,
    STRIP_WORDS,
    WORD,
    Form,
    Operand,
    Product,
)
from cokernel.compiler.values import Buffer
from cokernel.compiler.vector_words import (
    Cache,
    first_lanes,
    least,
    load_first,
    prefetch,
    splat,
    transposed,
    widened,
)

# Smaller products are left to others: copying would cost more than it brings.
LEAST = (8, 16, 16)


def form_of(dtype: Any) -> Form | None:
    """How matrices of a dtype are multiplied on this machine, None if not here."""
    if not codegen.host_has("avx512f") and not (
        codegen.host_has("avx2") and codegen.host_has("fma")
    ):
        return None
    if np.dtype(dtype) == np.float32:
        return Form.FLOAT32
    if np.dtype(dtype) == ml_dtypes.bfloat16:
        return Form.PAIRS if codegen.host_has("avx512bf16") else Form.WIDENED
    return None


def lanes_of(form: Form) -> int:
    """How many words the vectors have in which products of this form are computed."""
    return 16 if form is Form.PAIRS or codegen.host_has("avx512f") else 8


def is_worthwhile(m: int, k: int, n: int) -> bool:
    """Whether a product of (m, k) and (k, n) elements is large enough."""
    return all(size >= least for size, least in zip((m, k, n), LEAST, strict=True))


def is_readable(matrices: Buffer) -> bool:
    """Whether rows or columns of a stack of matrices lie without gaps inside."""
    return 1 in matrices.strides[1:] and min(matrices.strides[1:]) >= 1


def multiply(
    context: Context,
    form: Form,
    target: Buffer,
    left: Buffer,
    right: Buffer,
    *,
    add: bool | ir.Value,
) -> None:
    """Emits target = left @ right, or target += left @ right, for stacks of matrices: float32
    (batch, m, n), and (batch, m, k) and (batch, k, n) in the dtype of the form. `add` says which,
    and may be an i1 that is known only when the code runs.

    The operands are as `is_readable` wants them, the columns of the target lie side by side, and
    the target overlaps no operand.
    """
    batch, m, k = left.shape
    n = right.shape[2]
    lies = (_operand(*left.strides[1:]), _operand(*reversed(right.strides[1:])))
    product = Product(form, lanes_of(form), m, k, n, *lies, target.strides[1])
    arena = context.program.arena
    rooms = [arena.allocate(product.left_bytes), arena.allocate(product.right_bytes)]
    if isinstance(add, bool):
        add = ir.Constant(i1, add)
    loop = context.function.sibling("products", [*[pointer] * 5, i1])
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
    context.call(loop, [target.address, left.address, right.address, *addresses, add])


def _operand(line: int, inside: int) -> Operand:
    """An operand, given its strides from one row (or column) to the next and inside of it."""
    return Operand(line, False) if inside == 1 else Operand(inside, True)


def _function(context: Context, caller: FunctionBuilder, product: Product) -> FunctionBuilder:
    """The function that computes one product; products that are alike share it."""
    functions = context.kernel.shared_functions
    if product not in functions:
        functions[product] = _Loops(context, caller, product).emit()
    return functions[product]


class _Loops:
    """Emits the loops over blocks and panels."""

    def __init__(self, context: Context, caller: FunctionBuilder, product: Product):
        self.context = context
        self.caller = caller
        self.product = product
        self.floats = vector_words.floats(product.lanes)
        self.words = vector_words.words(product.lanes)
        self.halves = vector_words.halves(product.lanes)

    def emit(self) -> FunctionBuilder:
        """A function of target, left, right, the rooms for a block of the left and of the right
        matrix, and whether to add to the target."""
        product = self.product
        copy_left, copy_right = self._copy_left(), self._copy_right()
        kernels = {
            (rows, vectors): self._kernel(rows, vectors)
            for _, _, rows in product.regions
            for vectors in product.panel_vectors
        }
        function = self.caller.sibling("product", [*[pointer] * 5, i1])
        target, left, right, left_room, right_room, add = function.parameters

        def call(callee: FunctionBuilder, *arguments: Index | ir.Value) -> None:
            values = [function.index(argument) for argument in arguments]
            function.builder.call(callee.function, [function.core, *values])

        with (
            function.loop(0, product.n, step=BLOCK_COLUMNS) as columns_loop,
            function.loop(0, product.summed_words, step=product.block_words) as words_loop,
        ):
            column, word = columns_loop.counter, words_loop.counter
            columns = least(function, BLOCK_COLUMNS, function.subtract(product.n, column))
            rest_words = function.subtract(product.summed_words, word)
            steps = least(function, product.block_words, rest_words)
            element = function.multiply(word, product.per_word)
            rest = function.subtract(product.k, element)
            source = self._at(function, right, product.right, element, column)
            call(copy_right, source, right_room, columns, steps, rest)
            is_later = function.builder.icmp_signed("!=", word, ir.Constant(i64, 0))
            adds = function.builder.or_(is_later, add)
            for first, count, rows in product.regions:
                with function.loop(0, count, step=product.block_groups) as block:
                    rest_groups = function.subtract(count, block.counter)
                    groups = least(function, product.block_groups, rest_groups)
                    row = function.add(first, function.multiply(block.counter, rows))
                    source = self._at(function, left, product.left, element, row)
                    call(copy_left, source, left_room, function.multiply(groups, rows), steps, rest)
                    with (
                        function.loop(0, columns, step=product.panel_columns) as panel,
                        function.loop(0, groups) as group,
                    ):
                        offset = function.multiply(
                            function.divide(panel.counter, product.panel_columns),
                            product.panel_bytes,
                        )
                        line = WORD * (1 if product.left.is_across else product.left_step)
                        inner_row = function.multiply(group.counter, rows)
                        to = function.linear_index(
                            [function.add(row, inner_row), function.add(column, panel.counter)],
                            [product.target_step * WORD, WORD],
                        )
                        wide = function.subtract(columns, panel.counter)
                        # Each group brings its share of the next panel closer.
                        share = product.step_share * product.block_words
                        soon = function.add(offset, function.multiply(group.counter, share))
                        soon = function.add(soon, product.panel_bytes)
                        arguments = [
                            function.core,
                            function.advance(left_room, function.multiply(inner_row, line)),
                            function.advance(right_room, offset),
                            function.advance(target, to),
                            function.index(steps),
                            function.index(wide),
                            adds,
                            function.advance(right_room, soon),
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
        limit = ir.Constant(i64, narrow * self.product.lanes)
        is_narrow = builder.icmp_signed("<=", function.index(wide), limit)
        with builder.if_else(is_narrow) as branches:
            for branch, vectors in zip(branches, (narrow, *more), strict=True):
                with branch:
                    builder.call(kernels[rows, vectors].function, arguments)

    def _at(
        self,
        function: FunctionBuilder,
        base: ir.Value,
        operand: Operand,
        element: Index,
        line: Index,
    ) -> ir.Value:
        """The address of an element along the summed dimension in a row or column."""
        return function.advance(base, self._offset(function, operand, element, line))

    def _offset(
        self, function: FunctionBuilder, operand: Operand, element: Index, line: Index
    ) -> Index:
        """The bytes from the first element of an operand to one along the summed dimension in a row
        or column."""
        steps = [operand.step, 1] if operand.is_across else [1, operand.step]
        offset = function.linear_index([element, line], steps)
        return function.multiply(offset, self.product.element_bytes)

    # Copying.

    def _copy_left(self) -> FunctionBuilder:
        """A function of source, room, rows, words and elements along the summed dimension."""
        product = self.product
        function = self.caller.sibling("copy_left", [pointer, pointer, i64, i64, i64])
        source, room, rows, steps, rest = function.parameters
        if product.left.is_across:
            with (
                function.loop(0, steps) as word,
                function.loop(0, rows, step=product.lanes) as row,
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
                function.loop(0, steps, step=product.lanes) as word,
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
        height, step = (STRIP_WORDS, 1) if product.right.is_across else (product.lanes,) * 2
        with (
            function.loop(0, steps, step=height) as strip,
            function.loop(0, columns, step=product.panel_columns) as panel,
        ):
            index = function.divide(panel.counter, product.panel_columns)
            to = function.advance(room, function.multiply(index, product.panel_bytes))
            end = least(function, steps, function.add(strip.counter, height))
            with function.loop(strip.counter, end, step=step) as word:
                element = function.multiply(word.counter, product.per_word)
                left_over = function.subtract(rest, element)
                for number in range(PANEL_VECTORS):
                    column = function.add(panel.counter, number * product.lanes)
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
                                least(function, function.add(column, lane), last),
                            )
                            for lane in range(product.lanes)
                        ]
                        loaded = transposed(
                            function,
                            [self._load_along(function, item, left_over) for item in origins],
                        )
                    if product.right.is_across:
                        self._prefetch_strip(function, source, to, word.counter, column, number)
                    for lane, register in enumerate(loaded):
                        place = function.linear_index(
                            [function.add(word.counter, lane), number * product.lanes],
                            [product.panel_columns * WORD, WORD],
                        )
                        function.builder.store(register, function.advance(to, place), align=WORD)
        function.finish()
        return function

    def _prefetch_strip(
        self,
        function: FunctionBuilder,
        source: ir.Value,
        panel: ir.Value,
        word: Index,
        column: Index,
        number: int,
    ) -> None:
        """Begins to read the same place of the next strip, and to write that of the next panel: the
        processor foresees neither, because both lie far from here."""
        product = self.product
        first = number * product.lanes
        if first * product.element_bytes % LINE_BYTES == 0:
            for part in range(product.per_word):
                following = function.multiply(function.add(word, STRIP_WORDS), product.per_word)
                element = function.add(following, part)
                offset = self._offset(function, product.right, element, column)
                prefetch(function, source, offset, Cache.SECOND)
        if first * WORD % LINE_BYTES == 0:
            place = function.linear_index([word, first], [product.panel_columns * WORD, WORD])
            following = function.add(place, product.panel_bytes)
            prefetch(function, panel, following, Cache.FIRST, is_read=False)

    def _load_along(self, function: FunctionBuilder, address: ir.Value, rest: Index) -> ir.Value:
        """A vector of words from elements that follow each other along the summed dimension, zeros
        behind the last of `rest` elements."""
        match self.product.form:
            case Form.FLOAT32:
                return load_first(function, self.words, address, rest)
            case Form.WIDENED:
                return widened(function, load_first(function, self.halves, address, rest))
            case Form.PAIRS:
                loaded = load_first(
                    function, vector_words.halves(2 * self.product.lanes), address, rest
                )
                return function.builder.bitcast(loaded, self.words)

    def _load_across(
        self,
        function: FunctionBuilder,
        address: ir.Value,
        operand: Operand,
        wide: Index,
        rest: Index,
    ) -> ir.Value:
        """A vector of words of as many neighbouring lines, of which there are `wide`."""
        match self.product.form:
            case Form.FLOAT32:
                return load_first(function, self.words, address, wide)
            case Form.WIDENED:
                return widened(function, load_first(function, self.halves, address, wide))
            case Form.PAIRS:
                builder = function.builder
                low = load_first(function, self.halves, address, wide)
                if self.product.k % 2:
                    # The last pair lacks its second element.
                    is_whole = builder.icmp_signed(">", function.index(rest), ir.Constant(i64, 1))
                    wide = builder.select(is_whole, function.index(wide), ir.Constant(i64, 0))
                following = function.advance(address, 2 * operand.step)
                high = load_first(function, self.halves, following, wide)
                return builder.or_(builder.zext(low, self.words), widened(function, high))

    # The kernel.

    def _kernel(self, rows: int, count: int) -> FunctionBuilder:
        """A function of the addresses of rows, panel and target, the number of words to sum over,
        how many columns there are, whether to add to the target, and the address of what is needed
        soon. `count` is of the vectors of columns.
        """
        product = self.product
        vector_bytes = product.lanes * WORD
        function = self.caller.sibling(
            f"multiply_{rows}x{count * product.lanes}",
            [pointer, pointer, pointer, i64, i64, i1, pointer],
        )
        left, panel, target, steps, wide, adds, soon = function.parameters
        builder = function.builder
        between, onward = product.left_step * WORD, WORD
        if product.left.is_across:
            between, onward = onward, between
        places = [
            [
                function.advance(target, row * product.target_step * WORD + number * vector_bytes)
                for number in range(count)
            ]
            for row in range(rows)
        ]
        spread = product.target_spread(rows)
        if spread is None:
            for place in itertools.chain(*places):
                prefetch(function, place, 0, Cache.FIRST, is_read=False)
        sums = [ir.Constant(self.floats, None)] * (rows * count)
        with function.loop(0, steps, carry=[left, panel, *sums], rolled=True) as loop:
            at, to, *sums = loop.carry
            columns = [
                builder.load(
                    function.advance(to, number * vector_bytes),
                    typ=self.words,
                    align=vector_bytes,
                )
                for number in range(count)
            ]
            ahead = function.multiply(loop.counter, product.step_share)
            prefetch(function, soon, ahead, Cache.SECOND)
            if spread is not None:
                self._prefetch_target(function, target, loop.counter, spread)
            following = []
            for row in range(rows):
                word = builder.load(function.advance(at, row * between), typ=i32, align=WORD)
                repeated = splat(function, word, self.words)
                for number in range(count):
                    total = sums[row * count + number]
                    following.append(self._multiply_add(function, repeated, columns[number], total))
            loop.next = [
                function.advance(at, onward),
                function.advance(to, product.panel_columns * WORD),
                *following,
            ]
        sums = loop.carry[2:]
        in_last = function.subtract(wide, (count - 1) * product.lanes)

        def store(mask: ir.Value | None) -> None:
            with builder.if_else(adds) as branches:
                for branch, is_adding in zip(branches, (True, False), strict=True):
                    with branch:
                        self._store(function, places, sums, mask, is_adding)

        mask = first_lanes(function, product.lanes, in_last)
        if product.lanes == 16:
            store(mask)
        else:
            # Processors with 256 bits may take long to store under a mask.
            limit = ir.Constant(i64, product.lanes)
            is_whole = builder.icmp_signed(">=", function.index(in_last), limit)
            with builder.if_else(is_whole) as (whole, partial):
                with whole:
                    store(None)
                with partial:
                    store(mask)
        function.finish()
        return function

    def _prefetch_target(
        self, function: FunctionBuilder, target: ir.Value, step: Index, spread: int
    ) -> None:
        """Brings one line of the target closer: the next one after each 2**spread steps."""
        builder = function.builder
        # Of each row this takes PANEL_VECTORS lines, a power of two as vectors have whole lines.
        line = builder.lshr(function.index(step), ir.Constant(i64, spread))
        in_row = builder.and_(line, ir.Constant(i64, PANEL_VECTORS - 1))
        row = builder.lshr(line, ir.Constant(i64, PANEL_VECTORS.bit_length() - 1))
        offset = function.linear_index([row, in_row], [self.product.target_step * WORD, LINE_BYTES])
        prefetch(function, target, offset, Cache.SECOND)

    def _store(
        self,
        function: FunctionBuilder,
        places: list[list[ir.Value]],
        sums: list[ir.Value],
        mask: ir.Value | None,
        is_adding: bool,
    ) -> None:
        """Stores sums to the places of their rows, or adds them to what is there; with a mask, only
        those lanes of the last place of each row."""
        builder = function.builder
        overloads = [self.floats, pointer]
        flat = [(place, mask if place is row[-1] else None) for row in places for place in row]
        values = sums
        if is_adding:
            # All loads come before the first store. Where rows are a multiple of 4096 bytes apart,
            # the processor takes a load for one of what has just been stored in another row.
            values = []
            for (place, some), value in zip(flat, sums, strict=True):
                if some is None:
                    before = builder.load(place, typ=self.floats, align=WORD)
                else:
                    arguments = [place, some, ir.Constant(self.floats, None)]
                    before = function.intrinsic(
                        "llvm.masked.load", self.floats, arguments, overloads=overloads
                    )
                values.append(builder.fadd(before, value))
        for (place, some), value in zip(flat, values, strict=True):
            if some is None:
                builder.store(value, place, align=WORD)
            else:
                arguments = [value, place, some]
                function.intrinsic("llvm.masked.store", void, arguments, overloads=overloads)

    def _multiply_add(
        self, function: FunctionBuilder, left: ir.Value, right: ir.Value, addend: ir.Value
    ) -> ir.Value:
        if self.product.form is Form.PAIRS:
            return function.call_external(
                codegen.MULTIPLY_PAIRS, self.floats, [addend, left, right]
            )
        left, right = (function.builder.bitcast(item, self.floats) for item in (left, right))
        return function.intrinsic("llvm.fma", self.floats, [left, right, addend])
