"""The static plan of a core's private memory and of the memory that cores share: offsets are chosen
while code is emitted.
"""

import bisect

ALIGNMENT = 64


def round_up(size: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is at least `size`."""
    return -(-size // alignment) * alignment


class Allocation:
    """A range of bytes in an arena, given back when the last Python reference to it goes.

    Code is emitted in the order it runs, so a value that no Python object holds any more is a value
    that no code emitted later can read. Whoever uses a pointer into an allocation must hold the
    allocation until the use has been emitted.
    """

    def __init__(self, arena: "Arena", offset: int, size: int, *, is_lasting: bool = False):
        self.arena = arena
        # Whether code emitted earlier may use it again: see `Arena.allocate_unused`.
        self.is_lasting = is_lasting
        self.offset = offset
        self.size = size

    def __del__(self) -> None:
        self.arena._release(self.offset, self.size)


class Arena:
    """Plans a block of memory first-fit, in units of cache lines; `size` is the block that the
    finished plan needs.
    """

    def __init__(self) -> None:
        self.size = 0
        # Free ranges below `size`, sorted by offset and never adjacent.
        self._free: list[tuple[int, int]] = []

    def allocate(self, size: int) -> Allocation:
        """Reserves `size` bytes until the returned allocation is dropped."""
        size = round_up(max(size, 1))
        for position, (offset, available) in enumerate(self._free):
            if available >= size:
                if available == size:
                    del self._free[position]
                else:
                    self._free[position] = (offset + size, available - size)
                return Allocation(self, offset, size)
        if self._free and sum(self._free[-1]) == self.size:
            offset, _ = self._free.pop()
        else:
            offset = self.size
        self.size = offset + size
        return Allocation(self, offset, size)

    def allocate_unused(self, size: int) -> Allocation:
        """Reserves bytes that no allocation has ever had: for what must survive from one iteration
        of a loop to the next, although the code emitted so far may run again in between.
        """
        offset, size = self.size, round_up(max(size, 1))
        self.size = offset + size
        return Allocation(self, offset, size, is_lasting=True)

    def _release(self, offset: int, size: int) -> None:
        position = bisect.bisect(self._free, (offset, size))
        if position < len(self._free) and offset + size == self._free[position][0]:
            size += self._free.pop(position)[1]
        if position and sum(self._free[position - 1]) == offset:
            offset, before = self._free.pop(position - 1)
            size += before
            position -= 1
        self._free.insert(position, (offset, size))
