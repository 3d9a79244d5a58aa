"""Every case of the table in `docs/transformations.md` is right with Cokernel."""

import pathlib

import pytest
from transformation_cases import CASES, Api

import cokernel

TABLE = pathlib.Path(__file__).parents[2] / "docs" / "transformations.md"


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.part}: {case.title}")
def test_case(case, copies):
    case.run(Api(cokernel.kernel, copies))


def test_the_table_has_every_case_and_no_other():
    rows = [line.split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    listed = [(row[0].removeprefix("| "), row[1]) for row in rows[2:]]
    assert listed == [(case.part, case.title) for case in CASES]
