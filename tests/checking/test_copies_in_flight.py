"""A copy that outlives the scope of its memory is one finding, counted once for each copy."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel.checking.schedules import STRATEGIES

COPIES = 3


def found(body, strategy, seed):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((16,), jnp.float32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[pltpu.SemaphoreType.DMA],
    )
    options = cokernel.Checked(strategy=strategy, seed=seed)
    report = cokernel.explore(kernel, jnp.ones(16), schedules=1, options=options)
    return report.of_kind("CopyInFlight")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whether_it_meets_the_end_of_its_scope_or_the_begin_of_the_next(strategy, seed):
    def body(x_ref, out_ref, done):
        @pl.loop(0, COPIES)
        def _start(i):
            def scope(window):
                pltpu.make_async_copy(x_ref, window, done).start()

            pl.run_scoped(scope, pltpu.VMEM((16,), jnp.float32))

        @pl.loop(0, COPIES)
        def _wait(i):
            pltpu.make_async_copy(x_ref, out_ref, done).wait()

        out_ref[...] = x_ref[...]

    [finding] = found(body, strategy, seed)
    assert finding.name == "window"
    assert [party.action for party in finding.parties] == ["writes", "ends the scope"]
    # Copies that take effect in the memory of a later scope race with each other as well.
    assert 1 <= finding.occurrences <= COPIES


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_copy_that_lies_in_pieces_is_counted_once(strategy):
    def body(x_ref, out_ref, done):
        def scope(window):
            pltpu.make_async_copy(window.at[0:2, 0:8], window.at[2:4, 0:8], done).start()

        pl.run_scoped(scope, pltpu.VMEM((4, 16), jnp.float32))
        pltpu.make_async_copy(x_ref, out_ref, done).wait()
        out_ref[...] = x_ref[...]

    [reads] = found(body, strategy, 0)
    assert (reads.occurrences, reads.indices) == (1, "[0:2, 0:8]")
    [writes] = reads.details
    assert "when the scope of window[2:4, 0:8] ends" in writes
