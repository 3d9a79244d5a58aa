"""Measures a kernel against the chip it is written for: memories, registers, DMA granules.

What is compared are the numbers that JAX publishes of a chip (`pltpu.get_tpu_info()`). A kernel
that stays within them may still be refused by the chip's compiler, which needs memory of its own:
compiling ahead of time is what tells.
"""

import dataclasses
import linecache
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cokernel import _jax, meshes
from cokernel.checking.findings import Finding, Party
from cokernel.checking.report import merged
from cokernel.compiler import dtypes
from cokernel.compiler.analysis import argument_names, inner_jaxprs
from cokernel.compiler.layout import space_of
from cokernel.compiler.program import source_line
from cokernel.source_lines import SourceLine

# The tile in which a TensorCore keeps arrays: sublanes of 32 bits, and lanes.
SUBLANES, LANES = 8, 128
# A DMA of a SparseCore addresses HBM in words of so many bytes.
HBM_ALIGNMENT_BYTES = 32


@dataclasses.dataclass(frozen=True)
class _Program:
    """One program of the kernel, with what is known of its chip."""

    name: str
    mesh: Any
    jaxpr: Any
    chip: Any

    @property
    def is_vector_subcore(self) -> bool:
        return isinstance(self.mesh, _jax.VectorSubcoreMesh)

    @property
    def is_tensor_core(self) -> bool:
        return isinstance(self.mesh, _jax.TensorCoreMesh)

    def finding(self, sentence: str, name: str, line: SourceLine | None, advice: str) -> Finding:
        party = Party(
            program=self.name,
            core="every core",
            action="",
            is_dma=False,
            name=name,
            operation="",
            file=line.file if line else None,
            line=line.line if line else None,
            function=line.function if line else None,
            code=(linecache.getline(line.file, line.line).strip() or None) if line else None,
        )
        return Finding("ChipLimit", sentence, (party,), name, "", (advice,), None)


def findings(
    jaxprs: Sequence[Any],
    kernel_meshes: Sequence[Any],
    names: Sequence[str],
    scratch_count: int,
    target: str,
    made_at: SourceLine | None = None,
) -> list[Finding]:
    """Where a kernel asks for more than its chip has.

    Args:
      jaxprs, kernel_meshes, names: of each program.
      scratch_count: how many of the last parameters of each jaxpr are scratch.
      target: the name of the chip, as for `cokernel.target`.
      made_at: the line that made the kernel, and so asked for the scratch.
    """
    chip = meshes.chip_info(target)
    found: list[Finding] = []
    for jaxpr, mesh, name in zip(jaxprs, kernel_meshes, names, strict=True):
        program = _Program(name, mesh, jaxpr, chip)
        found += _memories(program, scratch_count, target, made_at)
        if program.is_vector_subcore:
            for eqn, line in _equations(jaxpr, None):
                found += _registers(program, eqn, line, target)
                found += _transfers(program, eqn, line, target)
    return list(merged(found))


def _equations(jaxpr: Any, enclosing: SourceLine | None) -> Iterator[tuple[Any, SourceLine | None]]:
    """All equations, inner ones too, each with the user's line that it comes from."""
    for eqn in jaxpr.eqns:
        line = source_line(eqn) or enclosing
        yield eqn, line
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner, line)


def _memories(
    program: _Program, scratch_count: int, target: str, made_at: SourceLine | None
) -> Iterator[Finding]:
    for space, budget in _budgets(program).items():
        scratch = program.jaxpr.invars[len(program.jaxpr.invars) - scratch_count :]
        own = [
            var.aval
            for var in scratch
            if space_of(var.aval)[0] is space and space_of(var.aval)[1] in (None, program.mesh)
        ]
        inner, line = _largest_scope(program, program.jaxpr, space)
        used = sum(_size(program, aval) for aval in own) + inner
        if used > budget:
            names = argument_names(program.jaxpr, scratch_count, "scratch")
            largest = max(own, key=lambda aval: _size(program, aval), default=None)
            name = "run_scoped"
            most = ""
            if largest is not None:
                name = names[[var.aval for var in scratch].index(largest)]
                most = f", most of all for {name!r} ({_size(program, largest):,})"
            yield program.finding(
                f"program {program.name!r} keeps {used:,} bytes in {space}{most}, and one of these "
                f"cores of a {target} has {budget:,}",
                name,
                line or made_at,
                "use smaller windows, or fewer of them at a time",
            )


def _budgets(program: _Program) -> Mapping[Any, int]:
    space = _jax.TpuMemorySpace
    if program.is_tensor_core:
        chip = program.chip
        return {space.VMEM: chip.vmem_capacity_bytes, space.SMEM: chip.smem_capacity_bytes}
    if program.is_vector_subcore and program.chip.sparse_core is not None:
        return {space.VMEM: program.chip.sparse_core.vmem_capacity_bytes}
    # What a scalar subcore has is not published.
    return {}


def _size(program: _Program, aval: Any) -> int:
    """The bytes of a Ref, on a TensorCore with the tiles that it fills in part."""
    itemsize = dtypes.itemsize(aval.dtype)
    shape = list(aval.shape)
    if program.is_tensor_core and space_of(aval)[0] is _jax.TpuMemorySpace.VMEM and shape:
        shape[-1] = -(-shape[-1] // LANES) * LANES
        if len(shape) > 1:
            rows = SUBLANES * max(1, 4 // itemsize)
            shape[-2] = -(-shape[-2] // rows) * rows
    return math.prod(shape) * itemsize


def _largest_scope(
    program: _Program, jaxpr: Any, space: Any, enclosing: SourceLine | None = None
) -> tuple[int, SourceLine | None]:
    """How much a jaxpr allocates at most at a time in a memory space, and on which line."""
    largest: tuple[int, SourceLine | None] = (0, None)
    for eqn in jaxpr.eqns:
        line = source_line(eqn) or enclosing
        own = 0
        if eqn.primitive is _jax.pallas_primitives.run_scoped_p:
            avals = [var.aval for var in eqn.params["jaxpr"].invars]
            own = sum(_size(program, aval) for aval in avals if space_of(aval)[0] is space)
        for inner in inner_jaxprs(eqn):
            size, deeper = _largest_scope(program, inner, space, line)
            if own + size > largest[0]:
                largest = (own + size, deeper or line)
    return largest


def _registers(
    program: _Program, eqn: Any, line: SourceLine | None, target: str
) -> Iterator[Finding]:
    lanes = program.chip.sparse_core.num_lanes
    for var in eqn.outvars:
        aval = var.aval
        if not isinstance(aval, _jax.ShapedArray) or not aval.shape:
            continue
        if isinstance(var, _jax.DropVar) or not isinstance(aval.dtype, np.dtype):
            continue
        wanted = lanes * max(1, 4 // dtypes.itemsize(aval.dtype))
        # A comparison of lanes has a bit for each, whatever is compared.
        is_mask = aval.dtype == bool
        if not (aval.shape == (lanes,) if is_mask else math.prod(aval.shape) == wanted):
            yield program.finding(
                f"a value of {aval.dtype}{list(aval.shape)} fills no register of a vector subcore "
                f"of a {target}, which takes {lanes if is_mask else wanted} elements of that type",
                "",
                line,
                "read, compute and write as many elements at a time as a register takes",
            )


def _transfers(
    program: _Program, eqn: Any, line: SourceLine | None, target: str
) -> Iterator[Finding]:
    if eqn.primitive is not _jax.tpu_primitives.dma_start_p:
        return
    granule = program.chip.sparse_core.dma_granule_size_bytes
    for side in eqn.params["tree"].unflatten(eqn.invars)[:2]:
        if isinstance(side, _jax.TransformedRef):
            for sentence in _misfits(side, granule, target):
                yield program.finding(
                    sentence,
                    "dma_start",
                    line,
                    f"let each DMA begin at, and move, a multiple of {granule} bytes",
                )


def _misfits(side: Any, granule: int, target: str) -> Iterator[str]:
    """What is odd about the minor dimension that a DMA selects, as far as it is known now."""
    aval = side.ref.aval if hasattr(side.ref, "aval") else None
    if aval is None or not side.transforms or not aval.shape:
        return
    indexer = side.transforms[0]
    if not isinstance(indexer, _jax.NDIndexer) or dtypes.is_semaphore(aval.dtype):
        return
    index = indexer.indices[-1]
    if not isinstance(index, _jax.Slice):
        return
    itemsize = dtypes.itemsize(aval.dtype)
    start = _known(index.start)
    if start is not None and start * itemsize % HBM_ALIGNMENT_BYTES:
        yield (
            f"a DMA begins {start * itemsize} bytes into a row, and a SparseCore of a {target} "
            f"addresses rows in steps of {HBM_ALIGNMENT_BYTES}"
        )
    size = _known(index.size)
    if size is not None and size != aval.shape[-1] and size * itemsize % granule:
        yield (
            f"a DMA moves {size * itemsize} bytes of each row, and a SparseCore of a {target} "
            f"moves {granule} at a time"
        )


def _known(value: Any) -> int | None:
    if isinstance(value, _jax.Literal):
        value = value.val
    return int(value) if isinstance(value, int | np.integer) else None
