"""How a matrix product is cut into blocks and panels: see `matrix_product.py`."""

import enum

from cokernel.records import record

WORD = 4
# A panel has two vectors of columns.
PANEL_VECTORS = 2
# With so many rows at a time the sums take 28 of 32 registers of sixteen lanes, or 12 of 16
# registers of eight.
MOST_ROWS = {16: 14, 8: 6}
# So many words along the summed dimension make a block, at most. The sums go to memory and back
# once for each, so that long ones are better; but with vectors of eight lanes a panel has to stay
# in the first-level cache, because there are half as many multiplications for each word that is
# read.
BLOCK_WORDS = {16: 1024, 8: 256}
# The copied rows of the left matrix take about so many bytes of the second-level cache.
LEFT_BYTES = {16: 512 << 10, 8: 256 << 10}
BLOCK_COLUMNS = 1024
# So many bytes come into the cache together.
LINE_BYTES = 64
# With fewer steps there is no time for that between them.
LEAST_SPREAD = 64
# So many words of all columns are copied before the next ones.
STRIP_WORDS = 8
# Between rows of the copy lie a few words, so that they do not all fall into the same few lines of
# the cache.
ROW_GAP = 16


class Form(enum.Enum):
    """What a word is made of."""

    FLOAT32 = "float32"
    WIDENED = "widened bfloat16"
    PAIRS = "pairs of bfloat16"


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


@record(frozen=True)
class Operand:
    """How an operand lies in memory: whether across the summed dimension, or along it, and how many
    elements there are from one such line to the next."""

    step: int
    is_across: bool


@record(frozen=True)
class Product:
    """What the functions of a product depend on."""

    form: Form
    lanes: int
    m: int
    k: int
    n: int
    left: Operand
    right: Operand
    target_step: int

    @property
    def panel_columns(self) -> int:
        return PANEL_VECTORS * self.lanes

    @property
    def block_groups(self) -> int:
        """How many groups of rows of the left matrix are copied at a time, at most."""
        return max(1, LEFT_BYTES[self.lanes] // (MOST_ROWS[self.lanes] * self.block_words * WORD))

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
        """The words along the summed dimension that a block has, but for the last one: whole
        vectors, about as many in each block."""
        blocks = -(-self.summed_words // BLOCK_WORDS[self.lanes])
        return round_up(-(-self.summed_words // blocks), self.lanes)

    def target_spread(self, rows: int) -> int | None:
        """The binary logarithm of how many steps of a block's sum there are for each line of so
        many rows of a panel of the target, which comes closer meanwhile; None if all lines are
        asked for before the first step.

        So many lines at once would keep what is multiplied waiting. Eight lanes have fewer lines,
        and steps so short that they have no time for the addresses.
        """
        if self.lanes * WORD != LINE_BYTES:
            return None
        last = self.summed_words % self.block_words or self.block_words
        return (last // (rows * PANEL_VECTORS)).bit_length() - 1 if last >= LEAST_SPREAD else None

    @property
    def regions(self) -> list[tuple[int, int, int]]:
        """The rows in groups of nearly equal size: first row, number of groups, rows of each."""
        groups = -(-self.m // MOST_ROWS[self.lanes])
        rows, more = divmod(self.m, groups)
        regions = [(0, more, rows + 1), (more * (rows + 1), groups - more, rows)]
        return [region for region in regions if region[1]]

    @property
    def panel_vectors(self) -> list[int]:
        """How many vectors of columns a panel may have."""
        last = -(-(self.n % self.panel_columns) // self.lanes) or PANEL_VECTORS
        return sorted({last, PANEL_VECTORS if self.n > self.panel_columns else last})

    @property
    def block_rows(self) -> int:
        """How many rows of the left matrix are copied at a time, at most."""
        return max(min(count, self.block_groups) * rows for _, count, rows in self.regions)

    @property
    def left_step(self) -> int:
        """The words between lines of the copied block of the left matrix."""
        if self.left.is_across:
            return ROW_GAP + round_up(self.block_rows, self.lanes)
        return ROW_GAP + self.block_words

    @property
    def left_bytes(self) -> int:
        """The room for the copied block of the left matrix."""
        lines = self.block_words if self.left.is_across else self.block_rows
        return lines * self.left_step * WORD

    @property
    def panel_bytes(self) -> int:
        return self.block_words * self.panel_columns * WORD

    @property
    def step_share(self) -> int:
        """How many bytes of a panel there are for each word and each group of rows in a block."""
        groups = max(min(count, self.block_groups) for _, count, _ in self.regions)
        return -(-self.panel_columns * WORD // groups)

    @property
    def right_bytes(self) -> int:
        """The room for the panels of a block of the right matrix."""
        return -(-min(self.n, BLOCK_COLUMNS) // self.panel_columns) * self.panel_bytes
