"""What most cases look like: a kernel beside its peers, each of which does the same job."""

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernels import Make
from measure import Case, Contender, Goal, jitted
from native import THREADS, address

COKERNEL = "Cokernel"
JIT = "jax.jit"
INTERPRETER = "JAX's HLO interpreter"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A kernel at a size that the slowest of JAX's interpret modes does in about a second.

    `prepare(make, options)` returns the kernel, built by `make(..., **options)`, its arguments,
    and what it should give (None if that is undefined).
    """

    size: str
    prepare: Callable[[Make, dict], tuple[Callable, tuple, np.ndarray | None]]
    tolerance: float = 1e-5


@dataclasses.dataclass(frozen=True)
class Group:
    """The cases of one kind, by their keys, the same kernels at a small size, and what their peers
    in C++ take, by the names of the functions.
    """

    cases: dict[str, Callable[[ctypes.CDLL], Case]]
    samples: dict[str, Sample]
    signatures: dict[str, list[Any]]


def by_hand(threads: int) -> str:
    """Returns the name of the contender in C++ that uses so many threads."""
    return f"C++ by hand, {threads} thread{'s' * (threads > 1)}"


def check(function: Callable, arguments: Sequence, expected: Any, tolerance: float = 1e-5) -> None:
    """Raises AssertionError unless the kernel gives what it should: a wrong one is not timed."""
    result = jax.jit(function)(*map(jnp.asarray, arguments))
    np.testing.assert_allclose(
        np.asarray(result, np.float64), np.asarray(expected, np.float64), tolerance, tolerance
    )


def row(
    key: str,
    title: str,
    *,
    kernel: Callable,
    plain: Callable,
    interpreted: Callable | None,
    arguments: Sequence[np.ndarray | jax.Array],
    expected: np.ndarray,
    hand: Callable[[int, int | None], float] | None,
    limit: tuple[str, Callable[[], float]],
    hand_name: Callable[[int], str] = by_hand,
    faster: float = 1,
    threads: int = THREADS,
    tolerance: float = 1e-5,
) -> Case:
    """Returns the case of a kernel beside its peers.

    Args:
      key: how the case is called on the command line.
      title: what the job is.
      kernel: the job as a kernel of Cokernel.
      plain: the job in plain JAX.
      interpreted: the job as a `pl.pallas_call(..., interpret=True)`, which JAX turns into HLO and
        XLA compiles; None where it cannot be said so.
      arguments: what all of them are called with.
      expected: the array that they give, within `tolerance`, relative and absolute.
      hand: does the job in C++ with that many threads, into the memory at an address or, without
        one, into new memory, and returns the time in seconds; None where nobody writes the loop
        by hand.
      hand_name: what `hand` is called with that many threads.
      limit: what limits the job on this machine, and a function that measures it in seconds.
      threads: how many threads the job can keep busy, for the loop in C++.
      faster: how many times faster than plain JAX the kernel is expected to be, at least.
    """
    arguments = tuple(map(jnp.asarray, arguments))
    peers = {JIT: plain} if interpreted is None else {JIT: plain, INTERPRETER: interpreted}
    contenders = [jitted(COKERNEL, kernel, *arguments)]
    contenders += [jitted(name, peer, *arguments) for name, peer in peers.items()]
    goals = [Goal(COKERNEL, 1 / faster if name == JIT else 1, name) for name in peers]
    if hand is not None:
        for number in sorted({1, threads}):
            contenders.append(Contender(hand_name(number), lambda n=number: hand(n, None)))
            out = np.zeros_like(expected)
            hand(number, address(out))
            np.testing.assert_allclose(out, expected, tolerance, tolerance)
        goals.append(Goal(COKERNEL, 1.3, hand_name(threads)))
    contenders.append(Contender(*limit))
    for function in (kernel, *peers.values()):
        check(function, arguments, expected, tolerance)
    return Case(key, title, contenders, goals, limit[0])


def traffic(limits: ctypes.CDLL, read: int, written: int) -> tuple[str, Callable[[], float]]:
    """Returns the limit of a job that reads and writes so many bytes of memory, each once."""
    name = f"limit: {THREADS} threads read {_bytes(read)}, write {_bytes(written)}"
    return name, lambda: limits.traffic(read, written, THREADS, 3)


def multiply_adds(limits: ctypes.CDLL, count: int) -> tuple[str, Callable[[], float]]:
    """Returns the limit of a job of so many multiplications, each with an addition, in float32."""
    name = f"limit: {THREADS} threads do {count:.2g} multiply-adds"
    return name, lambda: limits.multiply_adds(count, THREADS, 3)


def _bytes(count: int) -> str:
    size, unit = (2**20, "MiB") if count >= 2**20 else (2**10, "KiB")
    return f"{count / size:.3g} {unit}"
