"""Records do what dataclasses with the same options do."""

import copy
import dataclasses
import pickle

import pytest

from cokernel.records import record

WAYS = [{}, {"frozen": True}, {"frozen": True, "eq": False}, {"eq": False}]


def pair(make, options):
    """A class, and one that inherits from it, made by a decorator."""

    @make(**options)
    class Base:
        """Has a text."""

        first: int
        second: tuple = ()

        def total(self):
            return self.first + len(self.second)

    @make(**options)
    class Derived(Base):
        third: list = dataclasses.field(default_factory=list)
        fourth: str = dataclasses.field(default="x", compare=False)

    return Base, Derived


@pytest.fixture(params=WAYS, ids=str)
def classes(request):
    ours, theirs = pair(record, request.param), pair(dataclasses.dataclass, request.param)
    return list(zip(ours, theirs, strict=True))


def outcome(function, *arguments, **named):
    """What a function returns, or the kind of what it raises."""
    try:
        return function(*arguments, **named)
    except Exception as error:
        return type(error)


def test_fields_are_given_by_place_or_by_name_or_have_defaults(classes):
    for our, their in classes:
        for arguments, named in [
            ((1,), {}),
            ((1, (2,)), {}),
            ((), {"second": (3,), "first": 1}),
            ((1,), {"second": (4,)}),
            ((), {}),
            ((1,), {"first": 2}),
            ((1,), {"fifth": 2}),
            ((1, 2, 3, 4, 5), {}),
        ]:
            one, other = outcome(our, *arguments, **named), outcome(their, *arguments, **named)
            assert getattr(one, "__dict__", one) == getattr(other, "__dict__", other) or (
                one is other is TypeError
            )
            assert repr(one) == repr(other)


def test_what_a_factory_makes_is_not_shared(classes):
    our = classes[1][0]
    assert our(1).third is not our(1).third


def test_they_are_equal_and_hashed_as_dataclasses_are(classes):
    for our, their in classes:
        for values in [(1, ()), (2, ()), (1, (1,))]:
            assert (our(1, ()) == our(*values)) is (their(1, ()) == their(*values))
        assert our(1) != their(1)
    (our, their), (derived, _) = classes
    assert our(1) != derived(1)
    assert isinstance(outcome(hash, our(1)), int) == isinstance(outcome(hash, their(1)), int)
    if outcome(hash, our(1)) is not TypeError and our(1) == our(1):
        assert len({our(1), our(1), our(2)}) == 2


def test_fields_without_comparison_do_not_make_records_differ(classes):
    our, their = classes[1]
    same = our(1, fourth="y") == our(1)
    assert same is (their(1, fourth="y") == their(1))


def test_frozen_records_refuse_assignments(classes):
    for our, their in classes:
        one, other = our(1), their(1)
        assert outcome(setattr, one, "first", 2) is outcome(setattr, other, "first", 2)
        assert one.first == other.first
        assert outcome(delattr, one, "first") is outcome(delattr, other, "first")


def test_the_functions_for_dataclasses_take_them(classes):
    for our, their in classes:
        one, other = our(1, (2,)), their(1, (2,))
        assert dataclasses.is_dataclass(our)
        assert dataclasses.asdict(one) == dataclasses.asdict(other)
        changed = dataclasses.replace(one, first=5)
        assert (changed.first, changed.second, changed.total()) == (5, (2,), 6)
        assert copy.copy(one).__dict__ == one.__dict__


def test_places_of_a_pattern_are_those_of_the_fields(classes):
    our = classes[0][0]
    match our(1, (2,)):
        case our(first, second):
            assert (first, second) == (1, (2,))
        case _:
            pytest.fail("the pattern does not match")


@record(frozen=True)
class Kept:
    value: int


def test_they_can_be_pickled():
    assert pickle.loads(pickle.dumps(Kept(3))) == Kept(3)
