"""`cokernel demo`: which modules of Python's standard library resemble each other?

One kernel of three programs, on three kinds of cores, answers that; see `kernel.py`. What is shown
is the answer, how far it is from plain jax.numpy, how long both took, what each kind of core did,
and what a broken copy of the kernel says for itself.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# A difference that float32 sums of many thousand numbers, in another order, do not make.
TOLERANCE = 1e-3
REPETITIONS = 5
# So many modules are enough to show what a broken kernel says.
MODULES_FOR_BROKEN_KERNEL = 128


@dataclass(frozen=True)
class Timing:
    """Seconds of the first call, with everything compiled in it, and of the fastest later one."""

    first: float
    later: float


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Timing]:
    """Calls a function several times and returns its results and how long they took."""
    import jax

    seconds = []
    for _ in range(1 + REPETITIONS):
        start = time.perf_counter()
        results = jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return results, Timing(seconds[0], min(seconds[1:]))


def failure_text(function: Callable[..., Any], *arguments: Any) -> tuple[str, float]:
    """Calls a function that must fail and returns the error's text and the seconds until then.

    Raises AssertionError if it does not fail.
    """
    import jax

    start = time.perf_counter()
    try:
        jax.block_until_ready(function(*arguments))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error).removeprefix("INTERNAL: "), time.perf_counter() - start
    raise AssertionError("the broken kernel came to an end")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns 1 if the kernel's result is not that of jax.numpy."""
    parser = argparse.ArgumentParser(prog="cokernel demo", description=__doc__)
    parser.add_argument("--limit", type=int, metavar="N", help="read only the first N modules")
    options = parser.parse_args(arguments)
    if options.limit is not None and options.limit < 2:
        parser.error("--limit must be at least 2: one module resembles no other")

    import jax

    # Also where JAX has a better device: what is shown here is what a CPU can do.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return _run(options.limit)


def _run(limit: int | None) -> int:
    # Imported here, because the command line must not wait for JAX to answer `--help`.
    import jax
    import numpy as np

    import cokernel
    from cokernel.demo import corpus as corpora
    from cokernel.demo import kernel as kernels
    from cokernel.demo import report

    console = report.console()
    start = time.perf_counter()
    corpus = corpora.read_standard_library(limit)
    layout = corpora.lay_out(corpus.bags)
    table = corpora.word_vectors(corpus.bags)
    report.show_input(console, corpus, time.perf_counter() - start)

    ids, bounds, owners, table = jax.device_put((layout.ids, layout.bounds, layout.owners, table))
    with cokernel.target("v6e"):
        kernel = jax.jit(kernels.make(layout.num_modules))
    (_, tiles), kernel_timing = timed(kernel, ids, bounds, table)
    launch = cokernel.last_launch()
    assert launch is not None
    similarities = corpora.assemble(np.asarray(tiles), layout.num_modules)
    report.show_similar(console, corpus.names, similarities)

    plain = jax.jit(kernels.reference, static_argnums=3)
    (_, expected), plain_timing = timed(plain, ids, owners, table, layout.num_modules)
    difference = float(np.max(np.abs(similarities - np.asarray(expected))))
    report.show_times(console, kernel_timing, plain_timing, difference)
    report.show_cores(console, launch)

    few = corpora.lay_out(corpus.bags[:MODULES_FOR_BROKEN_KERNEL])
    with cokernel.target("v6e"):
        broken = jax.jit(kernels.make(few.num_modules, forgetful=True))
    text, _ = failure_text(broken, few.ids, few.bounds, table)
    report.show_failure(console, text)

    if not difference < TOLERANCE:
        console.print(f"The kernel is wrong: it differs from jax.numpy by {difference:.2e}.")
        return 1
    return 0
