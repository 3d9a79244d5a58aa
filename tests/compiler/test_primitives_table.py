"""docs/primitives.md says what the compiler does, and every rule is compiled by some test."""

import importlib.util
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table():
    path = ROOT / "scripts" / "primitives_table.py"
    spec = importlib.util.spec_from_file_location("primitives_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def record(table):
    return json.loads(table.RECORD.read_text())


def test_the_page_is_up_to_date(table, record):
    written = table.TABLE.read_text()
    assert written == table.render(record), "run scripts/primitives_table.py"


def test_every_rule_is_compiled_by_a_test(table, record):
    assert table.untested(record) == []


def test_the_recorded_tests_exist(record):
    files = {test for entry in record.values() for test in entry["tests"]}
    assert {file for file in files if not (ROOT / file).exists()} == set()
