"""What the demo prints."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cokernel.demo import kernel
from cokernel.statistics import LaunchStatistics

if TYPE_CHECKING:
    from cokernel.demo import Timing
    from cokernel.demo.corpus import Corpus

WIDTH = 96
PAIRS = 8
# Modules that most people know; the nearest to each are shown, if it was read.
WELL_KNOWN = ("threading", "http.client", "asyncio.queues", "tarfile", "email.header", "posixpath")
NEAREST = 3
# What each program does, and on what.
PROGRAMS = {
    "stage": ("scalar subcores", "copies word ids into shared memory"),
    "pool": ("vector subcores", "gathers the words' vectors, adds them"),
    "compare": ("TensorCore", "normalises and multiplies, in blocks"),
}


def console() -> Console:
    """Returns a console no wider than is pleasant to read, in a terminal or not."""
    wide = Console(highlight=False)
    return Console(highlight=False, width=min(wide.width, WIDTH) if wide.is_terminal else WIDTH)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.rule(Text(text, "bold"), align="left", style="dim")


def show_input(console: Console, corpus: "Corpus", seconds: float) -> None:
    """Shows the question, what was read, and the kernel that will answer."""
    console.print(Text("Which modules of Python's standard library resemble each other?", "bold"))
    sizes = [len(bag) for bag in corpus.bags]
    console.print(
        f"Read {len(sizes)} modules with {sum(sizes):,} names in {seconds:.1f} s;"
        f" the smallest has {min(sizes)}, the largest {max(sizes):,}."
    )
    console.print()
    console.print("One kernel answers. Its three programs run at the same time, on three kinds of")
    console.print("cores of a TPU v6e that this machine pretends to have, compiled for its CPU:")
    grid = Table.grid(padding=(0, 2))
    counts = {"stage": kernel.CORES, "pool": kernel.CORES * kernel.SUBCORES, "compare": 1}
    for name, (cores, what) in PROGRAMS.items():
        grid.add_row(Text(name, "bold cyan"), f"{counts[name]} {cores}", what)
    console.print(Padding(grid, (0, 0, 0, 2)))


def show_similar(console: Console, names: Sequence[str], similarities: np.ndarray) -> None:
    """Shows the pairs most alike, and what is nearest to modules that everybody knows."""
    count = len(names)
    matrix = similarities[:count, :count]
    packages = np.array([name.split(".")[0] for name in names])
    _heading(console, "Most alike, across packages")
    candidates = np.where(packages[:, None] == packages[None, :], -1, np.triu(matrix, 1))
    pairs = Table(box=None, show_header=False, padding=(0, 1))
    for flat in np.argsort(-candidates, axis=None)[:PAIRS]:
        first, second = divmod(int(flat), count)
        if candidates[first, second] <= 0:
            break
        value = float(matrix[first, second])
        pairs.add_row(
            f"{value:.2f}",
            Text("█" * round(20 * value), "green"),
            names[first],
            Text("and", "dim"),
            names[second],
        )
    console.print(pairs)

    known = [name for name in WELL_KNOWN if name in names]
    if not known:
        return
    _heading(console, "Nearest to modules you know")
    nearest = Table(box=None, show_header=False, padding=(0, 1))
    for name in known:
        row = matrix[list(names).index(name)]
        others = [int(i) for i in np.argsort(-row) if names[i] != name][:NEAREST]
        nearest.add_row(
            Text(name, "bold"), *(f"{names[other]} [dim]{row[other]:.2f}[/dim]" for other in others)
        )
    console.print(nearest)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:,.2f} ms"


def show_times(console: Console, ours: "Timing", plain: "Timing", difference: float) -> None:
    """Shows how far from jax.numpy the result is, and the times of both."""
    _heading(console, "Against jitted jax.numpy (take, segment_sum, matmul)")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column()
    table.add_column("first call, compiling included", justify="right")
    table.add_column("later calls", justify="right")
    for name, timing in (("the kernel", ours), ("jax.numpy", plain)):
        table.add_row(name, _milliseconds(timing.first), _milliseconds(timing.later))
    console.print(table)
    console.print(f" Largest difference between two similarities: {difference:.1e}")


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def show_cores(console: Console, launch: LaunchStatistics) -> None:
    """Shows what each kind of core did in one launch."""
    _heading(console, "What the cores did in one launch")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("program")
    table.add_column("on")
    for column in ("copies", "moved", "signals", "waits", "of which blocked"):
        table.add_column(column, justify="right")
    for program in launch.programs:
        cores, _ = PROGRAMS[program.name]
        table.add_row(
            Text(program.name, "bold cyan"),
            f"{program.cores} {cores}",
            f"{program.dma_count:,}",
            _bytes(program.dma_bytes),
            f"{program.signals:,}",
            f"{program.waits:,}",
            f"{program.blocked_waits:,}",
        )
    console.print(table)


def _wrapped(line: str, width: int) -> str:
    """Breaks a line that is too long, and indents what follows more than its beginning."""
    margin = " " * (len(line) - len(line.lstrip(" -")) + 2)
    return textwrap.fill(line, width, subsequent_indent=margin, break_long_words=False)


def show_failure(console: Console, text: str) -> None:
    """Shows what the broken kernel said."""
    _heading(console, "And when a kernel is wrong?")
    console.print(
        "In a copy of the kernel, one vector subcore of sixteen forgets to say that it has"
    )
    console.print("read a buffer. On the chip that hangs, without a word. Here it ends like this:")
    console.print()
    # The paths of an installed package are long, and what is interesting is at their end.
    here = str(Path(kernel.__file__).parent)
    # Four columns are the panel's own.
    lines = text.replace(here, "demo").splitlines()
    shown = Text("\n".join(_wrapped(line, console.width - 4) for line in lines))
    shown.highlight_regex(r"'[a-z_]+(\[\d+\])?'", "yellow")
    shown.highlight_regex(r"demo/\w+\.py:\d+", "cyan")
    shown.highlight_regex(r"^Deadlock", "bold red")
    shown.highlight_words(["Finished:", "What to do:"], "bold")
    console.print(Panel(shown, border_style="red", box=box.ROUNDED))
