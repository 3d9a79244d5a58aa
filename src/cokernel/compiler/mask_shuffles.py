"""Keeps LLVM from losing the zeros behind a part of a mask of AVX-512.

LLVM 22 fills the upper half of a mask with zeros by an instruction, such as `kmovb`, that it also
takes for a plain copy. Where the register has to be spilled, as it is across each call, the
instruction goes away and what stood in the upper half comes back. The instruction comes of shuffles
with lanes that are constantly false, so these become an `and` with a constant, which keeps to the
lanes it is told.
"""

import re

_OPERAND = r'%"[^"]*"|%[^ ,"]+|zeroinitializer|<i1 [^>]*>'
_SHUFFLE = re.compile(
    rf"^  (?P<name>%[^ ]+) = shufflevector <(?P<count>\d+) x i1> (?P<left>{_OPERAND}), "
    rf"<\d+ x i1> (?P<right>{_OPERAND}), "
    r"<(?P<wide>\d+) x i32> (?P<lanes>zeroinitializer|<i32 [^>]*>)(?P<end>.*)$",
    re.MULTILINE,
)


def without_constant_lanes(text: str) -> str:
    """The same module without shuffles of a mask with lanes that are constantly false."""
    return _SHUFFLE.sub(_masked, text)


def _items(text: str, count: int, zero: str) -> list[str]:
    """The elements of a constant vector."""
    if text == "zeroinitializer":
        return [zero] * count
    return [item.split()[1] for item in text[1:-1].split(", ")]


def _masked(found: re.Match[str]) -> str:
    count, wide = int(found["count"]), int(found["wide"])
    mask, constant, first = found["left"], found["right"], count
    if not mask.startswith("%"):
        mask, constant, first = constant, mask, 0
    if not mask.startswith("%") or constant.startswith("%"):
        return found[0]
    constants = _items(constant, count, "false")
    kept: list[str] = []
    for lane in _items(found["lanes"], wide, "0"):
        if lane == "poison":
            kept.append(lane)
        elif first <= int(lane) < first + count:
            kept.append(constants[int(lane) - first])
        else:
            kept.append(str(int(lane) % count))
    if "false" not in kept or "true" in kept or "undef" in kept:
        return found[0]
    name = found["name"].removeprefix("%").strip('"')
    taken, frozen = f'%"{name}.taken"', f'%"{name}.frozen"'
    lanes = ", ".join("i32 poison" if lane == "false" else f"i32 {lane}" for lane in kept)
    selected = ", ".join("i1 false" if lane == "false" else "i1 true" for lane in kept)
    # The lanes left out are poison, which an `and` with false keeps, hence the `freeze`.
    return (
        f"  {taken} = shufflevector <{count} x i1> {mask}, <{count} x i1> poison, "
        f"<{wide} x i32> <{lanes}>\n"
        f"  {frozen} = freeze <{wide} x i1> {taken}\n"
        f"  {found['name']} = and <{wide} x i1> {frozen}, <{selected}>{found['end']}"
    )
