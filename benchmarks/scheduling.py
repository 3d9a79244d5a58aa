"""Cases whose time goes into starting cores, waking one from another, and dealing them out."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from kernels import scheduling as kernels
from measure import Case, Contender, Goal, jitted
from native import COUNT, INT, POINTER, address
from rows import COKERNEL, JIT, Group, Sample, by_hand, check

import cokernel

ONE, TWO = "Cokernel, one worker", "Cokernel, two workers"
STEPS = 200_000


def _workers(number: int) -> dict:
    return {"compiler_params": cokernel.CompilerParams(num_workers=number)}


def semaphores(limits: ctypes.CDLL) -> Case:
    """A round trip of a semaphore between two cores."""
    rounds, thread_rounds = 100_000, 5_000
    one = kernels.round_trips(cokernel.kernel, rounds, **_workers(1))
    two = kernels.round_trips(cokernel.kernel, rounds, **_workers(2))
    case = Case(
        "semaphore",
        "Semaphore round trip between two cores",
        [
            jitted(ONE, one, calls=1, jobs=rounds),
            jitted(TWO, two, calls=1, jobs=rounds),
            Contender(
                "C++ condition variable, 2 threads",
                lambda: limits.round_trip_condition_variable(thread_rounds),
            ),
            Contender(
                "C++ by hand, 1 thread, a queue", lambda: limits.round_trip_one_thread(rounds)
            ),
            Contender(
                "C++ by hand, 2 threads that spin", lambda: limits.round_trip_two_threads(rounds)
            ),
        ],
        [Goal(ONE, 150e-9)],
    )
    for kernel in (one, two):
        check(kernel, (), np.full(2, rounds, np.int32))
    return case


def launch(limits: ctypes.CDLL) -> Case:
    """The cost of a launch of 34 cores that have nothing to do."""
    del limits
    x = jnp.arange(8, dtype=jnp.int32)
    return Case(
        "empty",
        "Empty kernel on 34 cores",
        [
            jitted(COKERNEL, kernels.empty(cokernel.kernel), x, calls=200),
            jitted(JIT, lambda x: x, x, calls=200),
            jitted("jitted x + 1", lambda x: x + 1, x, calls=200),
        ],
        [Goal(COKERNEL, 5, JIT)],
    )


def iterate(limits: ctypes.CDLL) -> Case:
    """A kernel that only computes, to see what a second worker brings."""
    x = np.random.default_rng(0).uniform(0.1, 0.9, 512).astype(np.float32)
    one = kernels.iterate(cokernel.kernel, STEPS, **_workers(1))
    two = kernels.iterate(cokernel.kernel, STEPS, **_workers(2))

    def loop(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, STEPS, lambda _, x: 2.9 * x * (1 - x), x)

    def hand(threads: int) -> Contender:
        return Contender(
            by_hand(threads), lambda: limits.iterate(address(x), None, STEPS, threads, 1)
        )

    case = Case(
        "workers",
        f"{STEPS:,} steps of x -> 2.9 x (1 - x) on 16 lanes of each of 32 subcores",
        [
            jitted(ONE, one, jnp.asarray(x)),
            jitted(TWO, two, jnp.asarray(x)),
            jitted(JIT, loop, jnp.asarray(x)),
            hand(1),
            hand(2),
        ],
        [Goal(TWO, 1 / 1.7, ONE), Goal(TWO, 1.3, by_hand(2))],
    )
    for kernel in (one, two):
        check(kernel, (x,), loop(jnp.asarray(x)))
    return case


def _sample_iterate(make, options):
    x = expected = np.random.default_rng(0).uniform(0.1, 0.9, 512).astype(np.float32)
    for _ in range(100):
        expected = np.float32(2.9) * expected * (1 - expected)
    return kernels.iterate(make, 100, **options), (x,), expected


GROUP = Group(
    cases={"semaphore": semaphores, "empty": launch, "workers": iterate},
    samples={
        "semaphore": Sample(
            "10 round trips",
            lambda make, options: (
                kernels.round_trips(make, 10, **options), (), np.full(2, 10, np.int32),
            ),
        ),
        "empty": Sample(
            "34 cores",
            lambda make, options: (
                kernels.empty(make, **options), (np.arange(8, dtype=np.int32),), None,
            ),
        ),
        "workers": Sample("100 steps", _sample_iterate),
    },
    signatures={
        "round_trip_condition_variable": [COUNT],
        "round_trip_two_threads": [COUNT],
        "round_trip_one_thread": [COUNT],
        "iterate": [POINTER] * 2 + [COUNT, INT, COUNT],
    },
)  # fmt: skip
