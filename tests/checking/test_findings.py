"""Findings put into words, from records as the runtime makes them."""

import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cokernel.checking import launches, report
from cokernel.checking.elements import Elements, elements_of
from cokernel.checking.findings import KINDS, finding_of
from cokernel.checking.options import Checked
from cokernel.checking.places import Places

SITES = [
    {
        "program": "worker",
        "program_number": 0,
        "operation": operation,
        "name": name,
        "file": __file__,
        "line": line,
        "function": "worker",
    }
    for operation, name, line in [
        ("write", "acc", 1),
        ("read", "total", 3),
        ("dma_start", "window", 6),
        ("semaphore_signal", "done", 7),
    ]
]
MEMORY = {
    "axes": [["core"]],
    "semaphores": {"0": [[0, 32, "done", [2]]]},
    "instances": {},
    "refs": [
        {
            "owner": "shared",
            "program": None,
            "buffer": None,
            "offset": 64,
            "bytes": 512,
            "name": "acc",
            "shape": [8, 16],
            "dtype": "float32",
            "itemsize": 4,
        }
    ],
}
PLACES = Places(SITES, MEMORY)
SCHEDULE = {"strategy": "random", "seed": 17, "depth": 3, "launch": 2}


def party(core, site, access, **more):
    return {
        "program": 0,
        "program_name": "worker",
        "coordinates": (core,),
        "index": core,
        "site": site,
        "access": access,
        "is_dma": False,
        "dma_site": -1,
        **more,
    }


def race(**changes):
    raw = {
        "kind": "Race",
        "first": party(0, 0, "write"),
        "second": party(1, 1, "read"),
        "memory": {
            "owner": "shared",
            "index": 0,
            "program": -1,
            "offset": 64 + 2 * 64,
            "parts": [(64 + 2 * 64, 16)],
            "is_cut_off": False,
            "element_bytes": 4,
        },
        "schedule": SCHEDULE,
        "occurrences": 3,
    }
    return {**raw, **changes}


def record(*findings, failure=None):
    return {
        "executable": "kernel",
        "findings": list(findings),
        "dropped": 0,
        "schedule": SCHEDULE,
        "behaviour": 1,
        "counts": {"accesses": 10},
        "failure": failure,
    }


def test_a_race_names_both_programs_lines_and_the_elements():
    text = finding_of(race(), PLACES).text()
    assert "Race: program 'worker' on core=0 writes acc[2, 0:4]" in text
    assert "program 'worker' on core=1 reads" in text
    assert f"{__file__}:1 in worker" in text
    assert f"{__file__}:3 in worker" in text
    assert "import json" in text
    assert "met 3 times" in text
    assert 'replay="ck1:random:2:17"' in text
    assert "What to do:" in text


def test_a_copy_is_told_from_a_core_and_named_by_the_line_that_started_it():
    copy = party(0, 0, "copy reads", is_dma=True, dma_site=2)
    finding = finding_of(race(first=party(0, 0, "write"), second=copy), PLACES)
    assert finding.parties[1].who == "a DMA of program 'worker' on core=0"
    assert finding.parties[1].line == 6
    assert "without waiting for it" in finding.sentence
    assert any("before its source is changed" in item for item in finding.advice)


def test_a_leftover_semaphore_is_named_with_its_index_and_count():
    raw = {
        "kind": "LeftoverSemaphore",
        "first": party(1, 3, "signal"),
        "second": None,
        "memory": None,
        "semaphore": {"owner": "private", "program": 0, "index": 0, "offset": 16, "count": 2},
        "value": 2,
    }
    finding = finding_of(raw, PLACES)
    assert "semaphore 'done[1]' still counts 2" in finding.sentence
    assert finding.replay is None


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("Race", "LeftoverSemaphore")])
def test_every_kind_has_a_sentence_that_names_what_it_is_about(kind):
    raw = race(
        kind=kind,
        text="what happened to 'acc'",
        value=1,
        wanted=2,
        moved=3,
        count=4,
        use="branch",
    )
    finding = finding_of(raw, PLACES)
    assert "acc" in finding.sentence
    json.dumps(finding.to_dict())


def test_equal_findings_are_counted_and_what_ended_the_launch_comes_first():
    leftover = race(kind="LeftoverSemaphore", memory=None, second=None, value=1)
    failure = {
        "kind": "OutOfBounds",
        "executable": "kernel",
        "program": 0,
        "program_name": "worker",
        "coordinates": (1,),
        "index": 1,
        "site": 0,
        "dimension": 0,
        "start": 9,
        "size": 1,
        "extent": 8,
    }
    made = report.report_of_record(record(leftover, race(), race(), failure=failure), PLACES)
    assert [f.kind for f in made.findings] == ["OutOfBounds", "Race", "LeftoverSemaphore"]
    assert made.findings[1].occurrences == 6
    assert "asks for index 9 of dimension 0" in made.findings[0].sentence
    assert "OutOfBounds, Race, LeftoverSemaphore" in made.headline()
    json.dumps(made.to_dict())


def test_a_warning_that_is_made_an_error_fails_the_launch_with_its_text():
    arguments = {"sites": SITES, "memory": MEMORY}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = launches.finish_launch(
            record(), options=Checked(), not_checked=["a callback's effects"], **arguments
        )
    assert "a callback's effects" in text
    assert "failed as well" not in text


def test_cores_that_run_again_are_not_other_cores():
    one = report.Report(kernel="k", counts={"cores": 3, "waits": 2})
    other = report.Report(kernel="another", counts={"cores": 5, "waits": 1})
    assert report.combined([one, one]).counts == {"cores": 3, "waits": 4}
    assert report.combined([one, other]).counts == {"cores": 8, "waits": 3}


def test_a_finding_fails_the_launch_unless_it_shall_only_warn():
    arguments = {"sites": SITES, "memory": MEMORY}
    text = launches.finish_launch(record(race()), options=Checked(), **arguments)
    assert "Race" in text
    assert text == str(launches.last_report())
    with pytest.warns(report.CheckWarning, match="Race"):
        warned = launches.finish_launch(
            record(race()), options=Checked(on_finding="warn"), **arguments
        )
    assert warned == ""


def test_a_clean_launch_raises_nothing():
    assert launches.finish_launch(record(), options=Checked(), sites=SITES, memory=MEMORY) == ""
    assert launches.last_report().is_clean


def test_what_was_not_checked_is_never_called_clean():
    with pytest.warns(report.CheckWarning, match="Not checked"):
        text = launches.finish_launch(
            record(),
            options=Checked(),
            sites=SITES,
            memory=MEMORY,
            not_checked=["primitive 'foo' runs through XLA"],
        )
    assert text == ""
    assert not launches.last_report().is_clean
    assert "nothing found in what was seen" in launches.last_report().headline()


def test_a_report_says_what_was_looked_at_and_what_was_not():
    asked = Checked(races=False, leftovers=False)
    unseen = ["primitive 'foo' runs through XLA"]
    arguments = {"sites": SITES, "memory": MEMORY, "not_checked": unseen}
    with pytest.warns(report.CheckWarning):
        assert launches.finish_launch(record(), options=asked, **arguments) == ""
    made = launches.last_report()
    assert "not looked for: races, leftovers" in made.headline()
    assert "10 accesses to memory" in made.coverage()
    assert "0 arrivals at barriers" in made.coverage()
    assert "off by the options: races, leftovers." in made.coverage()
    assert "Not checked: primitive 'foo' runs through XLA." in made.coverage()
    plain = json.loads(json.dumps(made.to_dict()))
    assert plain["is_clean"] is False
    assert plain["off"] == ["races", "leftovers"]
    assert plain["not_checked"] == unseen
    assert plain["coverage"] == made.coverage()


@pytest.mark.parametrize("name", ["races", "uninitialised", "bounds", "leftovers"])
def test_a_launch_is_not_clean_where_a_check_was_off(name):
    launches.finish_launch(record(), options=Checked(**{name: False}), sites=SITES, memory=MEMORY)
    assert not launches.last_report().is_clean
    assert report.combined([launches.last_report()]).off == (name,)


def test_reports_are_heard_by_those_who_collect_them():
    with launches.collected_reports() as outer, launches.collected_reports() as inner:
        launches.finish_launch(record(), options=Checked(), sites=SITES, memory=MEMORY)
    launches.finish_launch(record(), options=Checked(), sites=SITES, memory=MEMORY)
    assert len(outer) == len(inner) == 1


def test_a_report_is_drawn_for_a_terminal():
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.report_of_record(record(race()), PLACES))
    text = console.export_text()
    assert "Race (met 3 times)" in text
    assert "import json" not in text.splitlines()[0]
    assert "ck1:random:2:17" in text


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape), st.sets(st.integers(0, math.prod(shape) - 1), min_size=1)
        )
    ),
    st.sampled_from([1, 2, 4]),
)
def test_exactly_the_elements_are_named_whose_bytes_are_concerned(case, itemsize):
    shape, wanted = case
    ref = {"name": "x", "shape": shape, "dtype": "float32", "itemsize": itemsize, "offset": 64}
    parts = [(64 + number * itemsize, itemsize) for number in sorted(wanted)]
    elements = elements_of(ref, {"parts": parts})
    assert elements.count == len(wanted)
    assert elements == Elements.from_dict(json.loads(json.dumps(elements.to_dict())))
    array = np.arange(math.prod(shape)).reshape(shape)
    named = []
    for text in elements.parts:
        index = tuple(
            slice(*map(int, part.split(":"))) if ":" in part else int(part)
            for part in text.strip("[]").split(", ")
        )
        named += np.atleast_1d(array[index]).ravel().tolist()
    assert sorted(named) == sorted(wanted)


def test_a_column_is_one_part_and_scattered_elements_are_counted():
    ref = {"name": "x", "shape": [8, 16], "dtype": "float32", "itemsize": 4, "offset": 0}
    column = elements_of(ref, {"parts": [(64 * row + 12, 8) for row in range(8)]})
    assert column.text == "[0:8, 3:5]"
    some = elements_of(ref, {"parts": [(64 * row, 4) for row in (0, 3)]})
    assert some.text == "[0, 0] and [3, 0]"
    many = elements_of(ref, {"parts": [(8 * number, 4) for number in range(8)]})
    assert many.text == "[0, 0], [0, 2], [0, 4] and 5 more parts"


def test_a_finding_names_the_parts_as_data_and_is_read_back_from_json():
    raw = race()
    raw["memory"] = {**raw["memory"], "parts": [(64, 4), (64 + 128, 8)]}
    raw["also"] = [[party(2, 0, "write"), party(3, 1, "read")]]
    finding = finding_of(raw, PLACES)
    assert "acc[0, 0] and [2, 0:2]" in finding.sentence
    assert "met 3 times, also with core=2 and core=3" in finding.text()
    plain = json.loads(json.dumps(finding.to_dict()))
    assert plain["memory"]["parts"] == ["[0, 0]", "[2, 0:2]"]
    assert plain["memory"]["runs"] == [[0, 1], [32, 34]]
    assert type(finding).from_dict(plain).to_dict() == finding.to_dict()


def test_equal_findings_keep_the_elements_of_the_cores_they_name():
    other = race(first=party(4, 0, "write"), second=party(5, 1, "read"))
    other["memory"] = {**other["memory"], "parts": [(64, 4)]}
    [merged] = report.merged([finding_of(race(), PLACES), finding_of(other, PLACES)])
    assert merged.indices == "[2, 0:4]"
    assert [p.core for p in merged.parties] == ["core=0", "core=1"]
    assert merged.also == (("core=4", "core=5"),)


def test_a_race_is_the_same_whoever_came_first():
    swapped = race(first=party(1, 1, "read"), second=party(0, 0, "write"))
    [merged] = report.merged([finding_of(race(), PLACES), finding_of(swapped, PLACES)])
    assert merged.occurrences == 6
    assert merged.also == ()


def out_of_bounds(**changes):
    failure = {
        "kind": "OutOfBounds",
        "executable": "kernel",
        "program": 0,
        "program_name": "worker",
        "coordinates": (1,),
        "index": 1,
        "site": 0,
        "dimension": 1,
        "start": 9,
        "size": 4,
        "extent": 8,
    }
    return {**failure, **changes}


@pytest.mark.parametrize(
    ("failure", "action"),
    [
        (out_of_bounds(), "asks for what is not there"),
        (out_of_bounds(kind="Check", code=0, value=3), "fails a check"),
        (out_of_bounds(kind="Callback", text="ValueError: no"), "calls what raised"),
    ],
)
def test_who_ended_a_launch_is_told_as_data(failure, action):
    [finding] = report.report_of_record(record(failure=failure), PLACES).findings
    [who] = finding.parties
    assert (who.program, who.core, who.action) == ("worker", "core=1", action)
    assert (who.name, who.file, who.line, who.function) == ("acc", __file__, 1, "worker")
    assert who.code
    assert finding.text().count(f"{__file__}:1") == 1, "the line is told once"
    if finding.kind == "OutOfBounds":
        assert (finding.name, finding.indices) == ("acc", "[:, 9:13]")
        assert finding.advice


def test_who_waits_in_a_deadlock_is_told_as_data():
    semaphore = {"owner": "private", "program": 0, "index": 0, "offset": 16, "count": 2}
    blocked = {
        "program": 0,
        "program_name": "worker",
        "group": 0,
        "site": 3,
        "state": "semaphore",
        "semaphore": semaphore,
        "value": 3,
        "decrement": True,
    }
    failure = {
        "kind": "Deadlock",
        "executable": "kernel",
        "cores": [{**blocked, "coordinates": (core,), "index": core} for core in (0, 1)],
    }
    [finding] = report.report_of_record(record(failure=failure), PLACES).findings
    [who] = finding.parties
    assert (who.program, who.core, who.action) == ("worker", "core=0-1", "waits for")
    assert (who.name, who.line) == ("done", 7)
    assert finding.advice
    assert finding.text().count("What to do:") == 1
    json.dumps(finding.to_dict())


@pytest.mark.parametrize("options", [{}, {"max_findings": 1}, {"stop_at_first": True}])
def test_a_launch_that_did_not_end_raises_whatever_the_options_say(options):
    asked = Checked(on_finding="warn", **options)
    ended = {**record(race()), "is_complete": False}
    assert "Race" in launches.finish_launch(ended, options=asked, sites=SITES, memory=MEMORY)
    failed = record(failure=out_of_bounds())
    assert "OutOfBounds" in launches.finish_launch(
        failed, options=asked, sites=SITES, memory=MEMORY
    )
