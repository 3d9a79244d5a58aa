"""A fault inside the body of a pipeline is told with the names of the pipeline's operands."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

ROWS, BLOCK = 32, 8
X = jnp.ones((ROWS, 128))
OUT = jax.ShapeDtypeStruct(X.shape, X.dtype)
SPEC = pl.BlockSpec((BLOCK, 128), lambda i: (i, 0))


@pytest.fixture(params=[False, True], ids=["native", "stock"])
def found(request):
    """Runs the body of a kernel under a schedule and returns what is found."""

    def run(body):
        make = pl.kernel if request.param else cokernel.kernel
        with cokernel.pallas.enabled(), cokernel.target("v6e"):
            mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)
            report = cokernel.explore(make(body, out_type=OUT, mesh=mesh), X, X, schedules=1)
        text = json.dumps(report.to_dict()) + str(report)
        assert not any(name in text for name in ("allocations[", "carry[", "window_ref", "sem_"))
        return report.findings

    return run


def pipeline(step):
    def body(x_ref, weights_ref, o_ref):
        pltpu.emit_pipeline(step, grid=(ROWS // BLOCK,), in_specs=[SPEC, SPEC], out_specs=SPEC)(
            x_ref, weights_ref, o_ref
        )

    return body


def test_a_read_of_an_output_window_that_nobody_has_written(form, found):
    def step(x, weights, o):
        o[...] = o[...] + x[...] + weights[...]

    [finding] = found(pipeline(step))
    assert finding.sentence.endswith(
        " reads [0:8, 0:128] of the window of o_ref, which nobody has written, and the value "
        "ends in an output of the kernel"
    )
    # The pipeline copies from the window of an output, and never to it.
    assert finding.advice == (
        "write 'window of o_ref' before it is read, on every path that leads there",
    )
    plain = finding.to_dict()
    assert plain["memory"]["shape"] == [BLOCK, 128]
    assert plain["name"] == plain["memory"]["name"] == "window of o_ref"
    assert plain["allocation"]["name"] == "window of o_ref"


def test_an_index_beyond_an_input_window(form, found):
    def step(x, weights, o):
        first = (x[0, 0] * 4).astype(jnp.int32)
        o[...] = x[...] + weights[pl.ds(first, BLOCK)]

    [finding] = found(pipeline(step))
    assert finding.sentence.startswith("read of 'window of weights_ref' by ")
    assert "'window of weights_ref' has the shape (8, 128)" in finding.text()
    assert "the part of it" not in finding.text()
    assert finding.to_dict()["name"] == "window of weights_ref"


def racing(pick):
    """A body that writes to one of its windows while a copy of its own does so too."""

    def step(x, weights, o):
        target = pick(weights, o)

        def scope(done):
            copy = pltpu.make_async_copy(x, target, done)
            copy.start()
            target[...] = x[...]
            copy.wait()
            o[...] = weights[...]

        pl.run_scoped(scope, pltpu.SemaphoreType.DMA)

    return pipeline(step)


def check_race(finding, name):
    assert finding.kind == "Race"
    assert f" of the {name} that " in finding.sentence
    assert finding.to_dict()["name"] == name
    assert {party.name for party in finding.parties} == {name}


def test_a_race_of_the_body_with_its_own_copy_to_an_output_window(form, found):
    [finding] = found(racing(lambda weights, o: o))
    check_race(finding, "window of o_ref")


def test_a_race_of_the_body_with_its_own_copy_to_an_input_window(found):
    # The primitive takes no body that writes to its inputs.
    [finding] = found(racing(lambda weights, o: weights))
    check_race(finding, "window of weights_ref")


def with_allocations(extra):
    """A pipeline in a scope of the user's, in which `extra` uses what the pipeline allocates."""

    def body(x_ref, weights_ref, o_ref):
        def step(x, o):
            o[...] = x[...]

        run, allocate = pltpu.emit_pipeline_with_allocations(
            step, grid=(ROWS // BLOCK,), in_specs=(SPEC,), out_specs=(SPEC,)
        )

        def scope(mine):
            run(x_ref, o_ref, allocations=mine)
            window = mine[0]
            extra(
                pltpu.make_async_copy(
                    x_ref.at[0:BLOCK], window.window_ref.at[1], window.sem_recvs.at[1]
                )
            )

        pl.run_scoped(scope, allocate(x_ref, o_ref))

    return body


def test_a_wait_for_the_semaphore_of_a_window_that_nothing_ends(found):
    [finding] = found(with_allocations(lambda copy: copy.wait()))
    assert finding.kind == "Deadlock"
    assert "waits in dma_wait for 'semaphore 1 of window of x_ref':" in finding.text()


def test_a_copy_to_a_window_that_nobody_waits_for(found):
    [unwaited] = found(with_allocations(lambda copy: copy.start()))
    assert unwaited.kind == "UnwaitedCopy"
    assert unwaited.sentence.endswith(" it signals to 'semaphore 1 of window of x_ref'")
    details = "\n".join(unwaited.details)
    assert re.search(r"still be copying when the scope of .*window of x_ref.* ends", details)


def accumulating(step):
    """A pipeline whose output windows hold what the output held, for the body to add to."""

    def body(x_ref, weights_ref, o_ref):
        run, allocate = pltpu.emit_pipeline_with_allocations(
            step, grid=(ROWS // BLOCK,), in_specs=(SPEC,), out_specs=(SPEC,)
        )
        window, _ = allocate(x_ref, o_ref)
        total = pltpu.BufferedRef.input_output(SPEC, OUT.dtype, grid_rank=1)
        pltpu.sync_copy(weights_ref, o_ref)
        pl.run_scoped(lambda mine: run(x_ref, o_ref, allocations=mine), (window, total))

    return body


def test_an_index_beyond_a_window_that_is_input_and_output(found):
    def step(x, o):
        first = (x[0, 0] * 4).astype(jnp.int32)
        o[...] = x[...] + o[pl.ds(first, BLOCK)]

    [finding] = found(accumulating(step))
    assert finding.kind == "OutOfBounds"
    assert finding.sentence.startswith("read of 'window of o_ref' by ")


def test_a_window_that_is_input_and_output_and_used_rightly_is_clean(found):
    def step(x, o):
        o[...] = x[...] + o[...]

    assert not found(accumulating(step))
