"""Runs benchmark kernels, at a small size, under one of JAX's interpret modes or Cokernel.

    python benchmarks/interpret.py MODE KERNEL ...

prints one line of JSON for each kernel: {"seconds": time of the second call, "right": whether the
result is}, or {"refused": why it did not run}.
It is a program of its own because an interpreter may hang or abort.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from cases import SAMPLES
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels import CHIP

import cokernel

MODES = {
    "interpret=True": True,
    "InterpretParams()": pltpu.InterpretParams(),
    "Cokernel": None,
}


def outcome(mode: str, name: str) -> dict:
    """Runs a kernel twice and returns what is to be printed."""
    make = cokernel.kernel if mode == "Cokernel" else pl.kernel
    options = {} if mode == "Cokernel" else {"interpret": MODES[mode]}
    sample = SAMPLES[name]
    try:
        with cokernel.target(CHIP):
            kernel, arguments, expected = sample.prepare(make, options)
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
    right = expected is None or np.allclose(
        np.asarray(result, np.float64), np.asarray(expected, np.float64),
        rtol=sample.tolerance, atol=sample.tolerance,
    )  # fmt: skip
    return {"seconds": seconds, "right": bool(right)}


if __name__ == "__main__":
    for kernel_name in sys.argv[2:]:
        print(json.dumps(outcome(sys.argv[1], kernel_name)), flush=True)
