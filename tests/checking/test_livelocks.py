"""A livelock names what each core polls: in its text, its data, and its advice."""

import json

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import Finding

CORES = 4
FLAGS = cokernel.shared((CORES,), jnp.int32)


def livelock_of(body, *scratch, cores=CORES):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((cores,), jnp.int32),
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=scratch,
    )
    [finding] = cokernel.explore(kernel, schedules=1).findings
    assert finding.kind == "Livelock"
    return finding


def until(condition):
    lax.while_loop(lambda _: ~condition(), lambda n: n, jnp.int32(0))


def neighbours(out_ref, flags):
    core = lax.axis_index("core")
    flags[core] = 0
    plsc.subcore_barrier()
    until(lambda: flags[(core + 1) % flags.shape[0]] > 0)
    flags[core] = 1
    out_ref[core] = flags[core]


def test_each_core_is_named_with_the_elements_that_it_polls_itself():
    finding = livelock_of(neighbours, FLAGS)
    text = finding.text()
    plain = json.loads(json.dumps(finding.to_dict()))
    assert len(plain["parties"]) == CORES
    for party in plain["parties"]:
        core = int(party["core"].removeprefix("core="))
        element = f"[{(core + 1) % CORES}]"
        assert party["memory"]["parts"] == [element]
        assert party["polled"] == f"flags{element}"
        assert f"program 'neighbours' on core={core} polls flags{element}\n" in text
    first = plain["parties"][0]
    assert plain["memory"] == first["memory"]
    assert finding.indices == first["memory"]["parts"][0]
    assert f"on {first['core']} polls flags{finding.indices} and can make" in finding.sentence
    assert Finding.from_dict(plain) == finding


def test_a_core_that_polls_several_elements_is_told_with_all_of_them():
    def all_of(out_ref, flags):
        core = lax.axis_index("core")
        flags[core] = 0
        flags[core + 2] = 0
        plsc.subcore_barrier()
        until(lambda: (flags[2 * core] > 0) & (flags[2 * core + 1] > 0))
        out_ref[core] = flags[core]

    finding = livelock_of(all_of, FLAGS, cores=2)
    core = int(finding.parties[0].core.removeprefix("core="))
    assert finding.memory.runs == ((2 * core, 2 * core + 2),)
    assert f"polls flags[{2 * core}] and flags[{2 * core + 1}] and can" in finding.sentence


def test_semaphores_are_signalled_and_memory_is_written():
    def counting(out_ref, sem):
        core = lax.axis_index("core")
        until(lambda: pl.semaphore_read(sem) > core)
        out_ref[core] = core

    def both(out_ref, flags, sem):
        core = lax.axis_index("core")
        flags[core] = 0
        plsc.subcore_barrier()
        until(lambda: (pl.semaphore_read(sem) > core) & (flags[core] > 0))
        out_ref[core] = core

    regular = pltpu.SemaphoreType.REGULAR
    assert "let a core signal 'sem' before" in livelock_of(counting, regular).advice[0]
    assert "let a core write 'flags' before" in livelock_of(neighbours, FLAGS).advice[0]
    advice = livelock_of(both, FLAGS, regular).advice[0]
    assert "let a core write 'flags' or signal 'sem' before" in advice


def test_cores_that_there_is_no_room_for_are_counted():
    finding = livelock_of(neighbours, cokernel.shared((24,), jnp.int32), cores=24)
    named = {party.core for party in finding.parties}
    assert len(named) < 24
    assert finding.details == (f"... and {24 - len(named)} more cores poll",)
    assert finding.details[0] in finding.text()


def test_loops_that_let_others_go_on_several_times_are_found():
    def body(out_ref, flags, sems):
        core = lax.axis_index("core")
        flags[core] = 0
        plsc.subcore_barrier()
        counts = [lambda i=i: pl.semaphore_read(sems.at[i]) > core for i in range(3)]
        until(lambda: counts[0]() & counts[1]() & (flags[core] > 0) & counts[2]())
        out_ref[core] = core

    finding = livelock_of(body, FLAGS, pltpu.SemaphoreType.REGULAR((3,)), cores=1)
    assert [party.polled for party in finding.parties] == [
        "sems[0] (which counts 0)",
        "sems[1] (which counts 0)",
        "flags[0]",
        "sems[2] (which counts 0)",
    ]


def test_who_polls_a_counter_of_its_own_that_too_few_add_to_is_told():
    def body(out_ref, done):
        subcore = lax.axis_index("subcore")
        done[0] = 0
        plsc.subcore_barrier()

        @pl.when(subcore > 1)
        def _add():
            plsc.fetch_and_add(done.at[0], 1, subcore_id=0)

        pl.when(subcore == 0)(lambda: until(lambda: done[0] == 3))

    with cokernel.target("v6e"):
        kernel = cokernel.kernel(
            body,
            jax.ShapeDtypeStruct((1,), jnp.int32),
            mesh=plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=4
            ),
            scratch_types=[pltpu.SMEM((1,), jnp.int32)],
        )
        findings = cokernel.explore(kernel, schedules=5).findings
    [livelock] = [finding for finding in findings if finding.kind == "Livelock"]
    assert [(party.core, party.polled) for party in livelock.parties] == [
        ("core=0 subcore=0", "done[0]")
    ]
    assert "done[0]" in livelock.sentence
