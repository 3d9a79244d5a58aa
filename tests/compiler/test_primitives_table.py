"""docs/primitives.md says what the compiler does, and every rule is compiled by some test."""

import importlib.util
import inspect
import json
import pathlib

import pytest

from tests.compiler.ops import test_every_dtype, test_math
from tests.compiler.ops import test_every_dtype_of_arrays as of_arrays
from tests.compiler.ops.forms import name_of

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


def test_every_rule_has_a_tolerance_that_a_test_states(table, record):
    assert table.unstated(record) == []


def test_the_tolerances_are_those_that_the_tests_assert_now(table, record):
    """Those of the sweeps over every dtype: what they assert can be told without running them."""
    names = table.names()
    asserted = {}
    for case in (*test_every_dtype.CASES, *of_arrays.MOVES, *of_arrays.FOLDS):
        for dtype in case.dtypes:
            key = names[case.primitive], name_of(dtype)
            asserted[key] = max(asserted.get(key, 0.0), case.tolerance(dtype))
    for name, (_, _, ulps) in (test_math.ACCURACY | test_math.BINARY_ACCURACY).items():
        asserted[f"lax.{name}", "float32"] = ulps
    recorded = {key: record.get(key[0], {}).get("tolerances", {}).get(key[1]) for key in asserted}
    assert recorded == asserted, "run scripts/primitives_table.py --record with those tests"


def test_the_recorder_listens_to_functions_whose_arguments_are_equations(table):
    for owner, name, position in table.LISTENED:
        parameters = list(inspect.signature(getattr(owner, name)).parameters)
        assert parameters[position] == "eqn", f"{owner.__name__}.{name}"


def test_the_recorded_tests_exist(record):
    files = {test for entry in record.values() for test in entry["tests"]}
    assert {file for file in files if not (ROOT / file).exists()} == set()
