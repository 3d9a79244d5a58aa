"""Which Ref lies where, as plain data: how reports of checked mode name any byte of a launch."""

from collections.abc import Iterable
from typing import Any

from cokernel.compiler import dtypes
from cokernel.compiler.refs import Place, RefValue
from cokernel.records import record
from cokernel.source_lines import SourceLine

_OWNERS = {
    Place.OPERAND: "buffer",
    Place.INSTANCES: "buffer",
    Place.PRIVATE: "private",
    Place.SHARED: "shared",
    Place.DEVICE: "device",
}


@record(frozen=True)
class DescribedRef:
    """A Ref and what a report wants to say of it."""

    ref: RefValue
    # "argument", "output", "scratch" or "scoped".
    kind: str
    # Where a program allocates it.
    line: SourceLine | None


def describe_refs(refs: Iterable[DescribedRef]) -> list[dict[str, Any]]:
    """Where each Ref lies and what it is.

    "owner" is the block: "private" to a core of "program", "shared", "device", or "buffer" number
    "buffer" of the custom call. "offset" counts bytes from its start, "bytes" those of one
    instance. "name", "shape", "dtype", "itemsize" and "space" say what the Ref is, "kind" where it
    comes from; "file", "line" and "function" name the line that allocates it, if a program does.
    "slots" is the number of blocks that a pipeline keeps in the Ref, one behind the other, and
    "is_fetched" says whether it copies them there; 0 and False for other Refs. "instances" is None,
    or for a buffer with an instance for each core of a mesh its "program", "axes" and "sizes".

    Memory of a program is used again after a scope, so several scoped Refs may overlap.
    """
    return [_entry(known) for known in refs]


def _entry(known: DescribedRef) -> dict[str, Any]:
    ref, line = known.ref, known.line
    owner = _OWNERS[ref.place]
    instances = None
    if ref.place is Place.INSTANCES:
        instances = {
            "program": ref.program,
            "axes": [str(axis) for axis in ref.mesh.shape],
            "sizes": list(ref.mesh.shape.values()),
        }
    return {
        "owner": owner,
        "program": ref.program if owner == "private" else None,
        "buffer": ref.offset if owner == "buffer" else None,
        "offset": 0 if owner == "buffer" else ref.offset,
        "bytes": ref.nbytes,
        "name": ref.name,
        "shape": list(ref.shape),
        "dtype": "semaphore" if dtypes.is_semaphore(ref.dtype) else str(ref.dtype),
        "itemsize": ref.itemsize,
        "space": ref.space,
        "kind": known.kind,
        "file": line.file if line else None,
        "line": line.line if line else None,
        "function": line.function if line else None,
        "instances": instances,
        "slots": ref.slots.count if ref.slots else 0,
        "is_fetched": ref.slots is not None and ref.slots.is_fetched,
    }
