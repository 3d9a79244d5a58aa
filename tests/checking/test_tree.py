"""The tree of schedules, on a model of agents whose steps are lists of objects."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cokernel.checking.tree import ChoiceTree


def run(agents, choices):
    """Runs agents, each a list of objects it touches in turn, as the runtime would: the choices,
    then the first candidate. Gives the record and the order of (agent, position) steps.
    """
    positions = [0] * len(agents)
    last = None
    record = {"choices": [], "candidates": [], "continuing": [], "effects": []}
    order = []
    for number in itertools.count():
        ready = [a for a, steps in enumerate(agents) if positions[a] < len(steps)]
        if not ready:
            return record, order
        continues = last in ready
        if continues:
            ready.remove(last)
            ready.insert(0, last)
        choice = choices[number] if number < len(choices) else 0
        record["choices"].append(choice)
        record["candidates"].append([(a, "step", (agents[a][positions[a]],), a) for a in ready])
        record["continuing"].append(continues)
        record["effects"].append(([], [], False))
        last = ready[choice]
        order.append((last, positions[last]))
        positions[last] += 1


def visit(agents, preemptions, limit=5000):
    tree = ChoiceTree(preemptions)
    orders = []
    while (choices := tree.next()) is not None:
        assert len(orders) < limit
        record, order = run(agents, choices)
        orders.append(tuple(order))
        tree.add(record)
    assert tree.is_done
    return orders


def all_orders(agents):
    """Every order in which the steps of the agents can come."""
    slots = [agent for agent, steps in enumerate(agents) for _ in steps]
    for agent_order in set(itertools.permutations(slots)):
        positions = [0] * len(agents)
        order = []
        for agent in agent_order:
            order.append((agent, positions[agent]))
            positions[agent] += 1
        yield tuple(order)


def behaviour(agents, order):
    """What distinguishes orders: for each object the order of the steps on it."""
    by_object = {}
    for agent, position in order:
        by_object.setdefault(agents[agent][position], []).append((agent, position))
    return frozenset((key, tuple(steps)) for key, steps in by_object.items())


def interruptions(agents, order):
    count = 0
    for (one, position), (other, _) in itertools.pairwise(order):
        count += one != other and position + 1 < len(agents[one])
    return count


small = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=3)


def test_every_order_is_visited_once_where_all_steps_touch_one_object():
    agents = [[0, 0], [0, 0], [0, 0]]
    orders = visit(agents, None)
    assert len(orders) == len(set(orders)) == math.factorial(6) // 2**3


def test_steps_on_different_objects_are_not_visited_in_every_order():
    agents = [[0, 1], [2, 3], [4, 5]]
    assert len(visit(agents, None)) < len(set(all_orders(agents))) / 5


@given(small)
@settings(max_examples=60, deadline=None)
def test_without_a_bound_every_behaviour_is_visited(agents):
    seen = {behaviour(agents, order) for order in visit(agents, None)}
    assert seen == {behaviour(agents, order) for order in all_orders(agents)}


@given(small, st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_with_a_bound_exactly_the_orders_within_it_are_visited(agents, bound):
    orders = visit(agents, bound)
    expected = {order for order in all_orders(agents) if interruptions(agents, order) <= bound}
    assert len(orders) == len(set(orders))
    assert set(orders) == expected


def test_a_run_that_does_not_repeat_is_refused():
    tree = ChoiceTree(1)
    assert tree.next() == ()
    record, _ = run([[0, 0], [0, 0]], ())
    tree.add(record)
    assert tree.next() is not None
    record, _ = run([[1, 1], [0, 0]], ())
    with pytest.raises(RuntimeError, match="another one than in the run before"):
        tree.add(record)


def visit_with_effects(effects):
    """The orders that are visited of agents with one step each, all of different objects, with
    these effects.
    """
    tree, orders = ChoiceTree(None), []
    while (choices := tree.next()) is not None:
        record, order = run([[number] for number in range(len(effects))], choices)
        agents = [agent for agent, _ in order]
        record["effects"] = [effects[agent] for agent in agents[: len(record["choices"])]]
        orders.append(tuple(agents))
        tree.add(record)
    return orders


def test_steps_are_visited_in_both_orders_where_one_polls_what_the_other_writes():
    def written(first, end):
        return ([], [("buffer", 0, 0, first, end)], False)

    polled = ([("buffer", 0, 0, 4, 8)], [], False)
    nothing = ([], [], False)

    def seen(*effects):
        """Which of the first two agents goes first, in the orders that are visited."""
        return {order.index(0) < order.index(1) for order in visit_with_effects(effects)}

    assert seen(polled, written(0, 5), nothing) == {True, False}
    assert seen(written(7, 9), polled, polled) == {True, False}
    assert seen(([], [], True), nothing, nothing) == {True, False}
    apart = visit_with_effects([polled, written(0, 4), written(8, 9)])
    assert apart == visit_with_effects([nothing, nothing, nothing])
