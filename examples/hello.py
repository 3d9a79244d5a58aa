"""Two programs in one kernel: one greets, the other answers when it has been greeted."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

greeters, answerers = cokernel.CoreMesh(greeter=1), cokernel.CoreMesh(answerer=4)


def greet(x_ref, out_ref, message, greeted):
    """Writes a message and tells every answerer that it is there."""
    message[...] = x_ref[...] * 2
    for answerer in range(4):
        pl.semaphore_signal(greeted, device_id={"answerer": answerer})


def answer(x_ref, out_ref, message, greeted):
    """Waits for the message and answers, each core in its own row."""
    pl.semaphore_wait(greeted)
    out_ref[lax.axis_index("answerer")] = message[...] + lax.axis_index("answerer")


kernel = cokernel.mpmd_map(
    [(greeters, greet), (answerers, answer)],
    jax.ShapeDtypeStruct((4, 3), jnp.float32),
    scratch_types=[pltpu.HBM((3,), jnp.float32), pltpu.SemaphoreType.REGULAR @ answerers],
)
print(kernel(jnp.array([1.0, 2.0, 3.0])))
