"""Every planted fault is found, by its kind, its lines and its name; no twin has a finding."""

import json
import re

import pytest

from tests.faults import (
    chips,
    copies,
    deadlocks,
    leftovers,
    pipelines,
    races,
    uninitialised,
)
from tests.faults.case import CASES, lines_of

FILES = (chips, copies, deadlocks, leftovers, pipelines, races, uninitialised)
SCHEDULES = 100
# A finding that depends on no schedule needs no more than a few.
SCHEDULES_IF_ALWAYS = 5


@pytest.mark.parametrize("name", CASES)
def test_the_planted_fault_is_found(name):
    case = CASES[name]
    report = case.run(True, SCHEDULES_IF_ALWAYS if case.always else SCHEDULES)
    found = report.of_kind(case.kind)
    assert found, f"no {case.kind} was found:\n{report}"
    text = "\n".join(finding.text() for finding in found)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["is_clean"] is False
    assert case.name in text
    numbers = lines_of(found, case.file)
    # Where a deadlock could be ended is told in its text.
    numbers |= {int(line) for line in re.findall(rf"{re.escape(case.file)}:(\d+)", text)}
    assert case.lines <= numbers, f"lines {case.lines} were expected in\n{text}"


@pytest.mark.parametrize("name", CASES)
def test_the_repaired_twin_has_no_finding(name):
    report = CASES[name].run(False, SCHEDULES)
    assert not report.findings, str(report)
    assert report.schedules == SCHEDULES


def test_the_corpus_has_sixty_cases_or_more_of_every_kind():
    kinds = {case.kind for case in CASES.values()}
    assert len(CASES) >= 60
    assert kinds >= {
        "Race",
        "Deadlock",
        "Livelock",
        "OutOfBounds",
        "UninitialisedRead",
        "NeverWritten",
        "LeftoverSemaphore",
        "UnwaitedCopy",
        "CopyInFlight",
        "WaitTooLarge",
        "SemaphoreOverflow",
        "SemaphoreUnderflow",
        "ChipLimit",
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.__name__.rpartition(".")[2])
def test_every_fault_says_on_which_lines_it_must_be_found(file):
    for case in CASES.values():
        if case.build.__module__ == file.__name__ and case.kind not in ("NeverWritten",):
            assert case.lines, f"{case.build.__name__} has no line marked"
