"""Runs one benchmark kernel, at a small size, under one of JAX's interpret modes or Cokernel.

    python benchmarks/interpret.py KERNEL MODE

prints one line of JSON: {"seconds": time of the second call, "right": whether the result is}, or
{"refused": why it did not run}.
It is a program of its own because an interpreter may hang or abort.
"""

import json
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import kernels
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

MODES = {
    "interpret=True": True,
    "InterpretParams()": pltpu.InterpretParams(),
    "Cokernel": None,
}
# The sizes, as the tables say: about what the slowest mode does in a second a subcore.
SMALL = {
    "semaphore": "10 round trips",
    "empty": "34 cores",
    "gather": "4,096 rows in windows of 128",
    "affine": "2,048 float32 in windows of 64",
    "workers": "100 steps",
}


def _prepare(name: str, make: Callable, options: dict) -> tuple[Callable, tuple, np.ndarray | None]:
    """Returns the kernel, its arguments, and what it should give (None if that is undefined)."""
    random = np.random.default_rng(0)
    match name:
        case "semaphore":
            return kernels.round_trips(make, 10, **options), (), np.full(2, 10, np.int32)
        case "empty":
            return kernels.empty(make, **options), (np.arange(8, dtype=np.int32),), None
        case "gather":
            table = random.standard_normal((4096, 128), dtype=np.float32)
            indices = random.integers(0, 4096, 4096, dtype=np.int32)
            kernel = kernels.gather(make, 4096, 128, 128, **options)
            return kernel, (table, indices), table[indices]
        case "affine":
            x = random.random(2048, dtype=np.float32)
            return kernels.affine(make, 2048, 64, **options), (x,), x * 2 + 1
        case "workers":
            x = expected = random.uniform(0.1, 0.9, 512).astype(np.float32)
            for _ in range(100):
                expected = np.float32(2.9) * expected * (1 - expected)
            return kernels.iterate(make, 100, **options), (x,), expected
    raise ValueError(f"There is no kernel {name!r}; known are {', '.join(SMALL)}.")


def main(name: str, mode: str) -> dict:
    """Runs the kernel twice and returns what is to be printed."""
    make = cokernel.kernel if mode == "Cokernel" else pl.kernel
    options = {} if mode == "Cokernel" else {"interpret": MODES[mode]}
    try:
        with cokernel.target("v6e"):
            kernel, arguments, expected = _prepare(name, make, options)
            call = jax.jit(kernel)
            arguments = tuple(map(jnp.asarray, arguments))
            result = jax.block_until_ready(call(*arguments))
            start = time.perf_counter()
            jax.block_until_ready(call(*arguments))
            seconds = time.perf_counter() - start
    except Exception as error:
        # Whatever the interpreter raises is what the benchmark has to report. An exception in a
        # callback arrives with its traceback, whose last line says what happened.
        lines = str(error).strip().splitlines() or [""]
        line = lines[-1] if "Traceback" in lines[0] else lines[0]
        return {"refused": f"{type(error).__name__}: {line}"}
    right = expected is None or np.allclose(result, expected, rtol=1e-5)
    return {"seconds": seconds, "right": bool(right)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
