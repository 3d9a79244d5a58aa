"""The cases: each kernel, its peers in XLA and in C++ by hand, and what is expected of it."""

import ctypes
from collections.abc import Callable

import jax
import jax.numpy as jnp
import kernels
import numpy as np
from jax import lax
from measure import Case, Contender, Goal, jitted
from native import address

import cokernel

ONE, TWO = "Cokernel, one worker", "Cokernel, two workers"
TABLE_ROWS, ROWS, WIDTH, ROW_WINDOW = 4096, 131_072, 128, 128
SIZE, WINDOW = 1 << 20, 2048
STEPS = 200_000
HAND = "C++ by hand"


def _workers(number: int) -> dict:
    return {"compiler_params": cokernel.CompilerParams(num_workers=number)}


def _check(function: Callable, arguments: tuple, expected: np.ndarray) -> None:
    """Raises AssertionError unless the kernel gives what it should: a wrong one is not timed."""
    np.testing.assert_allclose(jax.jit(function)(*arguments), expected, rtol=1e-5)


def _by_hand(function: Callable[[int, np.ndarray | None], float], kept: np.ndarray):
    """Returns the C++ contenders: one and two threads, into new memory and into `kept`."""
    contenders = []
    for threads in (1, 2):
        name = f"{HAND}, {threads} thread{'s' * (threads > 1)}"
        contenders.append(Contender(name, lambda n=threads: function(n, None)))
        contenders.append(Contender(f"{name}, kept memory", lambda n=threads: function(n, kept)))
    return contenders


def semaphores(limits: ctypes.CDLL) -> Case:
    """A round trip of a semaphore between two cores."""
    rounds, thread_rounds = 100_000, 5_000
    one = kernels.round_trips(cokernel.kernel, rounds, **_workers(1))
    two = kernels.round_trips(cokernel.kernel, rounds, **_workers(2))
    case = Case(
        "semaphore",
        "Semaphore round trip between two cores",
        [
            jitted(ONE, one, jobs=rounds),
            jitted(TWO, two, jobs=rounds),
            Contender(
                "C++ condition variable, two threads",
                lambda: limits.round_trip_condition_variable(thread_rounds),
            ),
            Contender(f"{HAND}, 1 thread, a queue", lambda: limits.round_trip_one_thread(rounds)),
            Contender(
                f"{HAND}, 2 threads that spin", lambda: limits.round_trip_two_threads(rounds)
            ),
        ],
        [Goal(ONE, 150e-9)],
    )
    for kernel in (one, two):
        _check(kernel, (), np.full(2, rounds, np.int32))
    return case


def launch(limits: ctypes.CDLL) -> Case:
    """The cost of a launch of 34 cores that have nothing to do."""
    del limits
    x = jnp.arange(8, dtype=jnp.int32)
    name, peer = "Cokernel", "jitted identity"
    return Case(
        "empty",
        "Empty kernel on 34 cores",
        [
            jitted(name, kernels.empty(cokernel.kernel), x, calls=200),
            jitted(peer, lambda x: x, x, calls=200),
            jitted("jitted x + 1", lambda x: x + 1, x, calls=200),
        ],
        [Goal(name, 5, peer)],
    )


def gather(limits: ctypes.CDLL) -> Case:
    """Rows of a table, chosen by indices, through the memory of the subcores."""
    random = np.random.default_rng(0)
    table = random.standard_normal((TABLE_ROWS, WIDTH), dtype=np.float32)
    indices = random.integers(0, TABLE_ROWS, ROWS, dtype=np.int32)
    kept = np.zeros((ROWS, WIDTH), np.float32)
    kernel = kernels.gather(cokernel.kernel, ROWS, WIDTH, ROW_WINDOW)
    arguments = (jnp.asarray(table), jnp.asarray(indices))
    name, peer = "Cokernel", "jit(jnp.take)"
    case = Case(
        "gather",
        f"Gather of {ROWS:,} rows of {WIDTH} float32 from {TABLE_ROWS:,}, 32 subcores",
        [
            jitted(name, kernel, *arguments),
            jitted(peer, lambda table, i: jnp.take(table, i, axis=0), *arguments),
            *_by_hand(
                lambda threads, out: limits.gather(
                    address(table), address(indices), address(out),
                    ROWS, WIDTH, ROW_WINDOW, threads, 3,
                ),
                kept,
            ),
        ],
        [Goal(name, 1, peer), Goal(name, 1.3, f"{HAND}, 2 threads")],
    )  # fmt: skip
    _check(kernel, arguments, table[indices])
    return case


def affine(limits: ctypes.CDLL) -> Case:
    """x * 2 + 1 in steps of sixteen lanes."""
    x = np.random.default_rng(0).random(SIZE, dtype=np.float32)
    kept = np.zeros_like(x)
    kernel = kernels.affine(cokernel.kernel, SIZE, WINDOW)
    name, peer = "Cokernel", "jit(x * 2 + 1)"
    case = Case(
        "affine",
        "x * 2 + 1 on 2^20 float32 in steps of 16 lanes, 32 subcores",
        [
            jitted(name, kernel, jnp.asarray(x), calls=20),
            jitted(peer, lambda x: x * 2 + 1, jnp.asarray(x), calls=20),
            *_by_hand(
                lambda threads, out: limits.affine(
                    address(x), address(out), SIZE, WINDOW, threads, 20
                ),
                kept,
            ),
        ],
        [Goal(name, 1, peer), Goal(name, 1.3, f"{HAND}, 2 threads")],
    )
    _check(kernel, (jnp.asarray(x),), x * 2 + 1)
    return case


def iterate(limits: ctypes.CDLL) -> Case:
    """A kernel that only computes, to see what a second worker brings."""
    x = np.random.default_rng(0).uniform(0.1, 0.9, 512).astype(np.float32)
    kept = np.zeros_like(x)
    one = kernels.iterate(cokernel.kernel, STEPS, **_workers(1))
    two = kernels.iterate(cokernel.kernel, STEPS, **_workers(2))

    def loop(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, STEPS, lambda _, x: 2.9 * x * (1 - x), x)

    case = Case(
        "workers",
        f"{STEPS:,} steps of x -> 2.9 x (1 - x) on 16 lanes of each of 32 subcores",
        [
            jitted(ONE, one, jnp.asarray(x)),
            jitted(TWO, two, jnp.asarray(x)),
            jitted("jitted fori_loop on 512 lanes", loop, jnp.asarray(x)),
            *_by_hand(
                lambda threads, out: limits.iterate(address(x), address(out), STEPS, threads, 1),
                kept,
            )[::2],
        ],
        [Goal(TWO, 1 / 1.7, ONE), Goal(TWO, 1.3, f"{HAND}, 2 threads")],
    )
    for kernel in (one, two):
        _check(kernel, (jnp.asarray(x),), loop(jnp.asarray(x)))
    return case


CASES = {
    "semaphore": semaphores,
    "empty": launch,
    "gather": gather,
    "affine": affine,
    "workers": iterate,
}
