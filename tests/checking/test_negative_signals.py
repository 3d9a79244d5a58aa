"""A negative signal is told as what it does: too much is taken, or something back."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

X = jnp.ones(2, jnp.int32)


def kernel_of(body):
    return cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(X.shape, X.dtype),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[pltpu.SemaphoreType.REGULAR],
    )


@pytest.mark.parametrize("is_constant", [True, False])
def test_a_negative_signal_below_zero_is_an_underflow_and_ends_the_launch(is_constant):
    def body(x_ref, out_ref, ready):
        out_ref[...] = x_ref[...]
        pl.semaphore_signal(ready, 1)
        pl.semaphore_signal(ready, -3 if is_constant else x_ref[0] - 4)
        out_ref[0] = 7

    kernel = kernel_of(body)
    [finding] = cokernel.explore(lambda: kernel(X), schedules=2).findings
    assert finding.kind == "SemaphoreUnderflow"
    assert finding.sentence == (
        "program 'body' on core=0 takes 3 from 'ready' by a negative signal, but it counts 1"
    )
    assert "x_ref[0] - 4" in finding.parties[0].code
    with pytest.raises(Exception, match="SemaphoreUnderflow"), cokernel.checked(on_finding="warn"):
        jax.block_until_ready(kernel(X))


def test_a_negative_signal_that_takes_back_what_was_signalled_fails_the_check_as_natively():
    def body(x_ref, out_ref, ready):
        out_ref[...] = x_ref[...]
        pl.semaphore_signal(ready, 3)
        pl.semaphore_signal(ready, -3)

    kernel = kernel_of(body)
    [finding] = cokernel.explore(lambda: kernel(X), schedules=2).findings
    assert finding.kind == "Check"
    assert "the increment must not be negative, but is -3" in finding.sentence
