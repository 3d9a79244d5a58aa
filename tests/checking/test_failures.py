"""Reports of failed launches name everything one needs to find the mistake, and stay short."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel.checking.failures import describe
from cokernel.checking.places import boxes

HERE = __file__


def site(number, operation, name="sem", *, program="left", program_number=0, line=1, **details):
    return {
        "program": program,
        "program_number": program_number,
        "operation": operation,
        "name": name,
        "file": HERE,
        "line": line,
        "function": f"{program}.body",
        **details,
    }


def core(program, coordinates, state, number, *, index=0, group=0, **details):
    return {
        "program": program,
        "program_name": ("left", "right")[program],
        "coordinates": coordinates,
        "index": index,
        "group": group,
        "state": state,
        "site": number,
        **details,
    }


def blocked(program, coordinates, number, *, index=0, offset=0, count=0, value=1, owner="private"):
    semaphore = {
        "owner": owner,
        "index": index,
        "program": program if owner == "private" else -1,
        "offset": offset,
        "count": count,
    }
    return core(
        program,
        coordinates,
        "semaphore",
        number,
        index=index,
        semaphore=semaphore,
        value=value,
        decrement=True,
    )


MEMORY = {
    "semaphores": {"0": [[0, 96, "sems", [2, 3]], [96, 16, "lone", []]], "1": [[0, 16, "go", []]]},
    "instances": {
        "2": {
            "name": "kept",
            "shape": [2],
            "bytes": 32,
            "program": 0,
            "axes": ["core"],
            "sizes": [4],
        }
    },
    "axes": [["core", "subcore"], ["lane"]],
}


def deadlock(sites, *cores):
    return describe(
        {"kind": "Deadlock", "executable": "kernel", "cores": list(cores)}, sites, MEMORY
    )


def test_a_deadlock_says_first_what_it_is_and_of_which_kernel():
    sites = [site(0, "semaphore_wait", "go", program="right", program_number=1)]
    text = deadlock(sites, blocked(1, (0,), 0), core(0, (0, 0), "finished", -1))
    assert text.startswith("Deadlock: kernel 'kernel' cannot go on, because 1 of its 2 cores are")


def test_a_blocked_core_is_told_with_place_code_count_and_need():
    line = inspect.currentframe().f_lineno
    sites = [site(0, "semaphore_wait", "lone", line=line)]
    text = deadlock(sites, blocked(0, (1, 2), 0, offset=96, count=3, value=7))
    assert "left core=1 subcore=2 waits in semaphore_wait for semaphore 'lone'" in text
    assert f"at {HERE}:{line} in left.body" in text
    assert "line = inspect.currentframe().f_lineno" in text
    assert "it counts 3, and 7 is needed" in text


def test_the_element_of_an_array_that_was_chosen_at_run_time_is_worked_out():
    sites = [site(0, "semaphore_wait", "sems[...]")]
    assert "'sems[1, 2]'" in deadlock(sites, blocked(0, (0, 0), 0, offset=5 * 16))


def test_a_semaphore_that_came_with_an_operand_is_found():
    signal = site(1, "semaphore_signal", "kept[1]", signals=[["instances", 2, 16, 32, None]])
    sites = [site(0, "semaphore_wait", "kept[...]"), signal]
    waiting = blocked(0, (0, 0), 0, owner="buffer", index=2, offset=2 * 32 + 16)
    text = deadlock(sites, waiting, core(0, (0, 1), "finished", 1, index=1))
    assert "'kept[1]'" in text
    assert "it could be signalled" in text


def test_equal_cores_are_told_once():
    sites = [site(0, "semaphore_wait", "lone")]
    cores = [
        blocked(0, (first, second), 0, index=first * 16 + second, offset=96)
        for first in range(2)
        for second in range(16)
    ]
    text = deadlock(sites, *cores)
    assert "left core=0-1 subcore=0-15 wait in semaphore_wait" in text
    assert text.count("semaphore_wait") == 1


def test_what_differs_between_equal_cores_is_told_for_each():
    sites = [site(0, "semaphore_wait", "lone")]
    cores = [blocked(0, (0, i), 0, index=i, offset=96, value=i + 1) for i in range(3)]
    text = deadlock(sites, *cores)
    for i in range(3):
        assert f"core=0 subcore={i}: it counts 0, and {i + 1} is needed" in text


def test_a_thousand_different_cores_make_a_short_report():
    sites = [site(number, "semaphore_wait", "lone", line=number + 1) for number in range(1000)]
    cores = [blocked(0, (0, n), n, index=n, offset=96, value=n + 1) for n in range(1000)]
    assert len(deadlock(sites, *cores).splitlines()) < 120
    same_place = [blocked(0, (0, n), 0, index=n, offset=96, value=n + 1) for n in range(1000)]
    assert len(deadlock(sites, *same_place).splitlines()) < 40


def test_long_lists_of_cores_are_cut_off():
    sites = [site(0, "semaphore_wait", "lone")]
    every_third = [blocked(0, (0, n), 0, index=n, offset=96) for n in range(0, 3000, 3)]
    scattered = [
        blocked(0, (n, n * n % 101), 0, index=101 * n + n * n % 101, offset=96) for n in range(100)
    ]
    for cores in (every_third, scattered):
        text = deadlock(sites, *cores)
        assert f"{len(cores)} " in text
        assert "in all)" in text
        assert max(map(len, text.splitlines())) < 500


def test_those_who_could_signal_are_told_with_their_place_and_what_became_of_them():
    key = ["private", 1, 0, 16, None]
    sites = [
        site(0, "semaphore_wait", "go", program="right", program_number=1, line=2),
        site(1, "semaphore_signal", "their_go", line=3, signals=[key]),
        site(2, "semaphore_wait", "lone", line=4),
    ]
    text = deadlock(
        sites,
        core(0, (0, 0), "finished", 1, index=0),
        blocked(0, (0, 1), 2, index=1, offset=96),
        blocked(1, (0,), 0),
    )
    assert f"by left, semaphore_signal at {HERE}:3 in left.body" in text
    assert "left core=0 subcore=0 has finished" in text
    assert "left core=0 subcore=1 blocked on semaphore 'lone' at line 4" in text
    assert "The wait for 'go' follows from others" in text


def test_a_circle_of_waits_is_recognised():
    sites = [
        site(0, "semaphore_wait", "go", program="right", program_number=1),
        site(1, "semaphore_signal", "go", line=3, signals=[["private", 1, 0, 16, None]]),
        site(2, "semaphore_wait", "lone", line=4),
        site(
            3,
            "semaphore_signal",
            "lone",
            program="right",
            program_number=1,
            signals=[["private", 0, 96, 112, None]],
        ),
    ]
    text = deadlock(sites, blocked(0, (0, 1), 2, index=1, offset=96), blocked(1, (0,), 0))
    assert "The waits for 'lone' and 'go' wait for each other" in text


def test_a_signal_that_only_reaches_other_cores_or_elements_does_not_count():
    def report(key):
        sites = [
            site(0, "semaphore_wait", "sems[0, 1]"),
            site(1, "semaphore_signal", "sems[0, 0]", signals=[key]),
        ]
        others = core(0, (0, 1), "finished", 1, index=1)
        return deadlock(sites, blocked(0, (0, 0), 0, offset=16), others)

    for key, signalled in (
        (["private", 0, 0, 16, None], "'sems[0, 0]'"),
        (["private", 0, 16, 32, 1], "'sems[0, 1]' of another core"),
    ):
        text = report(key)
        assert "nothing in this kernel ever signals it" in text
        assert f"left signals {signalled} by semaphore_signal" in text
        # What is wrong with it is the one or the other.
        assert ("device_id" in text) == ("another core" in signalled)
    for key in (["private", 0, 16, 32, None], ["private", 0, 0, 96, 0]):
        assert "it could be signalled" in report(key)


def test_a_signal_to_the_own_semaphore_counts_for_the_own_core_alone():
    sites = [
        site(0, "semaphore_wait", "lone"),
        site(1, "semaphore_signal", "lone", signals=[["private", 0, 96, 112, "own"]]),
    ]
    others = [core(0, (0, i), "finished", 1, index=i) for i in (1, 2)]
    text = deadlock(sites, blocked(0, (0, 0), 0, offset=96), *others)
    assert "of those, now: left core=0 subcore=0 blocked on semaphore 'lone'" in text


def test_a_semaphore_nobody_signals_is_said_to_be_so():
    text = deadlock([site(0, "semaphore_wait", "lone")], blocked(0, (0, 0), 0, offset=96))
    assert "nothing in this kernel ever signals it" in text
    assert "Add a signal of 'lone', or remove the wait for it" in text


def test_a_wait_for_a_copy_nobody_starts_is_said_to_be_so():
    text = deadlock([site(0, "dma_wait", "lone")], blocked(0, (0, 0), 0, offset=96, value=512))
    assert "512 is needed (bytes)" in text
    assert "No copy is in flight that signals 'lone'" in text
    assert "start one before each wait for it" in text


def test_a_barrier_says_who_is_missing():
    sites = [site(0, "subcore_barrier", "barrier")]
    barrier = {"group": 1, "arrived": 2, "expected": 3}
    text = deadlock(
        sites,
        core(0, (1, 0), "barrier", 0, index=3, group=1, barrier=barrier),
        core(0, (1, 1), "finished", -1, index=4, group=1),
        core(0, (1, 2), "barrier", 0, index=5, group=1, barrier=barrier),
        core(0, (0, 0), "finished", -1, index=0, group=0),
    )
    assert "left core=1 subcore=0,2 wait in subcore_barrier for the barrier" in text
    assert "2 of 3 cores have arrived; missing: left core=1 subcore=1 has finished" in text


def failure(kind, **details):
    base = {
        "kind": kind,
        "executable": "kernel",
        "program": 0,
        "program_name": "left",
        "coordinates": (1, 2),
        "index": 18,
        "site": 0,
    }
    return describe({**base, **details}, [SITE], MEMORY)


SITE = site(0, "read", "table", shape="(64, 8)", messages=["{value} is not enough"], line=1)


@pytest.mark.parametrize(
    ("start", "size", "words"),
    [(64, 1, "index 64 "), (-3, 1, "index -3 "), (62, 4, "elements 62 to 65 "), (0, -2, "of -2 ")],
)
def test_an_index_out_of_bounds_is_told_with_ref_shape_range_core_and_line(start, size, words):
    text = failure("OutOfBounds", dimension=0, start=start, size=size, extent=64)
    assert text.startswith("OutOfBounds: read of 'table' by program 'left' on core=1 subcore=2")
    assert words in text
    assert "dimension 0" in text
    assert "valid are 0 to 63" in text
    assert "(64, 8)" in text
    assert f"at {HERE}:1 in left.body" in text
    assert "Reports of failed launches" in text
    hint = "do not count from the end as Python's do: -3 is not 61"
    assert (hint in text) == (start == -3)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda x_ref, i: x_ref[1, 2, i], "dimension 2, but valid are 0 to 7"),
        (lambda x_ref, i: x_ref[1, i, 0], "dimension 1, but valid are 0 to 3"),
        (lambda x_ref, i: x_ref.at[1].at[i[0]][0:4], "indexed here: (4, 8)"),
        (lambda x_ref, i: x_ref.reshape(8, 8)[i[0], 0:4], "indexed here: (8, 8)"),
    ],
)
def test_a_bad_index_names_its_dimension_and_the_shape_that_it_goes_into(read, words):
    def body(x_ref, index_ref, out_ref):
        out_ref[...] = read(x_ref, index_ref[...])

    out_type = jax.ShapeDtypeStruct((4,), jnp.float32)
    kernel = cokernel.kernel(body, out_type, mesh=cokernel.CoreMesh(core=1))
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(words)):
        jax.block_until_ready(kernel(jnp.ones((2, 4, 8)), jnp.array([9, 1, 0, 0])))


def test_an_index_into_nothing_is_out_of_bounds_too():
    assert "it has no elements" in failure("OutOfBounds", dimension=1, start=0, size=1, extent=0)


def test_a_failed_check_gives_the_message_of_its_site_with_the_number():
    text = failure("Check", code=0, value=12)
    assert text.startswith("Check: read of 'table' by program 'left' on core=1 subcore=2: 12 is")
    assert "12 is not enough" in text


def test_an_exception_in_a_callback_is_told_with_its_traceback():
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\nKeyError: 5'
    text = failure("Callback", callback=0, exception_type="KeyError", text=trace)
    assert text.splitlines()[0].endswith("on core=1 subcore=2 raised KeyError: 5")
    assert trace in text


def test_a_time_limit_says_where_every_core_was():
    cores = [
        core(0, (0, 0), "running", 0),
        core(0, (0, 1), "running", 0, index=1),
        blocked(1, (0,), 1),
        core(1, (1,), "unstarted", -1, index=1),
    ]
    sites = [SITE, site(1, "semaphore_wait", "go", program="right", program_number=1, line=5)]
    text = describe(
        {"kind": "TimeLimit", "executable": "k", "limit_s": 0.5, "elapsed_s": 0.51, "cores": cores},
        sites,
        MEMORY,
    )
    assert "kernel 'k' was stopped after 0.51 s, because its time_limit_s is 0.5" in text
    assert "left core=0 subcore=0-1: running, last seen at line 1" in text
    assert "right lane=0: blocked on semaphore 'go' at line 5" in text
    assert "right lane=1: not started yet" in text
    assert f"    at {HERE}:1 in left.body" in text
    assert f"    at {HERE}:5 in right.body" in text


def count_for_ever(x_ref, out_ref):
    out_ref[0] = lax.while_loop(
        lambda i: i >= x_ref[0],
        lambda i: (i * 5 + 3) & 1023,
        jnp.int32(1),
    )


def count_very_long(x_ref, out_ref):
    out_ref[0] = lax.fori_loop(
        0,
        2**31 - 1 + x_ref[0],
        lambda i, value: (value * 5 + i) & 1023,
        1,
    )


@pytest.mark.parametrize("interpret", [False, cokernel.Checked()], ids=["native", "checked"])
@pytest.mark.parametrize("body", [count_for_ever, count_very_long])
def test_a_loop_that_only_computes_is_told_with_its_line(body, interpret):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        mesh=cokernel.CoreMesh(core=1),
        interpret=interpret,
        compiler_params=cokernel.CompilerParams(time_limit_s=0.5),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="TimeLimit") as raised:
        jax.block_until_ready(kernel(jnp.zeros(1, jnp.int32)))
    lines, first = inspect.getsourcelines(body)
    line = first + next(i for i, text in enumerate(lines) if "out_ref[0] = lax." in text)
    # It may be stopped while it lets other cores go first.
    assert re.search(rf"(running|ready), last seen at line {line}\b", str(raised.value))
    assert f"at {__file__}:{line} in {body.__name__}" in str(raised.value)


def test_an_interrupt_and_an_internal_error_keep_their_kind():
    text = describe(
        {"kind": "Interrupted", "executable": "k", "elapsed_s": 2.0, "cores": []}, [], {}
    )
    assert text.startswith("Interrupted: kernel 'k' was stopped by Ctrl-C after 2 s")
    text = describe({"kind": "Internal", "executable": "k", "text": "no memory"}, [], {})
    assert text == "Internal: kernel 'k': no memory"


@pytest.mark.parametrize(
    "kind", ["Deadlock", "OutOfBounds", "Check", "Callback", "TimeLimit", "Interrupted", "Internal"]
)
def test_a_failure_at_an_unknown_place_is_told_all_the_same(kind):
    base = {"kind": kind, "executable": "k", "program": 3, "program_name": "left"}
    base |= {"coordinates": (0, 1), "site": -1, "dimension": 0, "start": 9, "size": 1, "extent": 4}
    base |= {"code": 7, "value": 8, "cores": [blocked(0, (0, 0), -1, owner="unknown", offset=-1)]}
    assert kind in describe(base, [], {})


def test_boxes_cover_all_points_once():
    points = [(0, 0), (0, 1), (0, 3), (2, 0), (2, 1), (2, 3), (5, 5)]
    covered = [
        (first, second)
        for firsts, seconds in boxes(points)
        for first in firsts
        for second in seconds
    ]
    assert sorted(covered) == points
    assert len(boxes(points)) == 2
    assert boxes([]) == []


# Whole kernels.


def failed(kernel, *args):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(kernel(*args))
    return str(caught.value)


def test_34_cores_of_three_programs_that_deadlock_make_a_report_of_a_page():
    with cokernel.target("v6e"):
        scalar = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2)
        vector = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
        tensor = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)
        semaphore = pltpu.SemaphoreType.REGULAR

        def staging(out_ref, staged, pooled):
            pl.semaphore_signal(staged, 1, device_id={"subcore": 3})

        def pooling(out_ref, staged, pooled):
            pl.semaphore_wait(staged, 1)
            pl.semaphore_signal(pooled, 1, device_id={"tensor": 0})

        def multiplying(out_ref, staged, pooled):
            pl.semaphore_wait(pooled, 32)

        kernel = cokernel.mpmd_map(
            [(scalar, staging), (vector, pooling), (tensor, multiplying)],
            jax.ShapeDtypeStruct((1,), jnp.int32),
            scratch_types=[semaphore @ vector, semaphore @ tensor],
        )
        text = failed(kernel)
    assert "31 of its 35 cores are blocked" in text
    assert "pooling core=0-1 subcore=0-2,4-15 wait in semaphore_wait for semaphore 'staged'" in text
    assert "multiplying tensor=0 waits in semaphore_wait for semaphore 'pooled'" in text
    assert "it counts 2, and 32 is needed" in text
    assert "staging core=0-1 have finished" in text
    assert 'pl.semaphore_signal(staged, 1, device_id={"subcore": 3})' in text
    assert "Every core that could signal 'staged' has finished" in text
    assert "The wait for 'pooled' follows from others and may need no change" in text
    assert len(text.splitlines()) < 40


def test_programs_of_the_same_name_and_line_are_told_apart():
    first, second = cokernel.CoreMesh(core=1), cokernel.CoreMesh(lane=1)

    def program(own):
        def wait(out_ref, one, two):
            pl.semaphore_signal((one, two)[own], 2)
            pl.semaphore_wait((one, two)[own], 3)

        return wait

    semaphore = pltpu.SemaphoreType.REGULAR
    kernel = cokernel.mpmd_map(
        [(first, program(0)), (second, program(1))],
        jax.ShapeDtypeStruct((1,), jnp.int32),
        scratch_types=[semaphore @ first, semaphore @ second],
    )
    text = failed(kernel)
    assert "wait__cpu_core_core core=0 waits in semaphore_wait for semaphore 'one'" in text
    assert "wait__cpu_core_lane lane=0 waits in semaphore_wait for semaphore 'two'" in text
    assert text.count("it counts 2, and 3 is needed") == 2
    for axis, name in (("core", "one"), ("lane", "two")):
        blocked_itself = f"wait__cpu_core_{axis} {axis}=0 blocked on semaphore '{name}'"
        assert f"of those, now: {blocked_itself}" in text
        assert f"Only the cores that wait for '{name}' could still signal it" in text


def test_a_dynamic_element_of_a_scoped_array_of_semaphores_is_named():
    def body(which_ref, out_ref):
        def scope(sems):
            pl.semaphore_wait(sems.at[0, which_ref[0]], 1)

        pl.run_scoped(scope, sems=pltpu.SemaphoreType.REGULAR((2, 5)))
        out_ref[0] = 0

    kernel = cokernel.kernel(
        body, jax.ShapeDtypeStruct((1,), jnp.int32), mesh=cokernel.CoreMesh(core=1)
    )
    assert "semaphore 'sems[0, 3]'" in failed(kernel, np.array([3], np.int32))


def test_a_dma_of_the_right_semaphore_but_another_core_is_told():
    def body(x_ref, out_ref, inbox, sent, received):
        copy = pltpu.make_async_remote_copy(
            x_ref, inbox, sent, received, device_id={"core": 0 * lax.axis_index("core")}
        )
        copy.start()
        copy.wait_send()
        copy.wait_recv()

    dma = pltpu.SemaphoreType.DMA
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        mesh=cokernel.CoreMesh(core=3),
        scratch_types=[cokernel.private((4,), jnp.int32), dma, dma],
    )
    text = failed(kernel, np.zeros(4, np.int32))
    assert "body core=1-2 wait in dma_wait for semaphore 'received'" in text
    assert "it counts 0, and 16 is needed (bytes)" in text
    assert "by body, dma_start at" in text
