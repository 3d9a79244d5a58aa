"""The races that checked mode finds are those of a naive happens-before oracle."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime_checked.harness import (
    ATOMIC,
    FETCH_AND_ADD,
    READ,
    STRATEGIES,
    UPDATE,
    WRITE,
    Kernel,
    schedule,
)

CORES = 3
BYTES = 3072
SEMAPHORES = 2

# Near the borders of shadow pages, small ones and whole pages.
ranges = st.one_of(
    st.tuples(st.integers(1016, 1030), st.sampled_from([1, 2, 3, 4, 8, 16])),
    st.sampled_from([(0, 1024), (0, 2048), (1024, 1024), (512, 1536), (1020, 8), (1024, 4)]),
)
cores = st.integers(0, CORES - 1)
semaphores = st.integers(0, SEMAPHORES - 1)
operations = st.one_of(
    st.tuples(
        st.just("access"),
        st.sampled_from([READ, READ, WRITE, ATOMIC, UPDATE]),
        ranges,
    ),
    st.tuples(st.just("fetch_and_add"), st.sampled_from([1016, 1024])),
    st.tuples(st.just("signal"), cores, semaphores, st.integers(1, 2)),
    st.tuples(st.just("wait"), semaphores, st.integers(1, 3)),
    st.tuples(st.just("look"), semaphores, st.integers(1, 2)),
    st.tuples(st.just("count"), semaphores),
    st.tuples(
        st.just("copy"),
        st.sampled_from([1016, 1020, 1028]),
        st.sampled_from([1024, 1040, 2048]),
        st.sampled_from([4, 8]),
        cores,
        semaphores,
        st.booleans(),
    ),
)
programs = st.lists(st.lists(operations, max_size=7), min_size=CORES, max_size=CORES)


class Oracle:
    """Follows the events of a launch in the order in which they happened, and keeps for each the
    set of all that came before it.
    """

    def __init__(self):
        self.before = []
        self.last = {}
        self.queues = {}
        self.elements = {}
        self.accesses = []

    def event(self, agent, *causes):
        earlier = [self.last[agent]] if agent in self.last else []
        closure = 0
        for cause in [*earlier, *causes]:
            closure |= self.before[cause] | 1 << cause
        self.before.append(closure)
        self.last[agent] = len(self.before) - 1
        return self.last[agent]

    def access(self, agent, kind, begin, size, site, *causes):
        number = self.event(agent, *causes)
        self.accesses.append((number, kind, begin, begin + size, site))
        return number

    def signal(self, semaphore, amount, event, is_dma=False):
        self.queues.setdefault(semaphore, []).append([amount, event, is_dma])

    def wait(self, agent, semaphore, value, *, take=True):
        causes = []
        queue = self.queues[semaphore]
        for entry in queue:
            part = min(value, entry[0])
            if part == 0:
                break
            value -= part
            if not entry[2] or part == entry[0]:
                causes.append(entry[1])
            if take:
                entry[0] -= part
        self.queues[semaphore] = [entry for entry in queue if entry[0]]
        self.event(agent, *causes)

    def count(self, agent, semaphore, amounts):
        """Reads the count; a copy of which something has been taken orders nothing."""
        causes = [
            event
            for left, event, is_dma in self.queues.get(semaphore, ())
            if not is_dma or left == amounts[event]
        ]
        self.event(agent, *causes)

    def races(self):
        """For each pair of sites the bytes on which their accesses race."""
        result = {}
        for i, (one, one_kind, one_begin, one_end, one_site) in enumerate(self.accesses):
            for other, other_kind, other_begin, other_end, other_site in self.accesses[:i]:
                begin, end = max(one_begin, other_begin), min(one_end, other_end)
                if begin >= end or self.before[one] >> other & 1:
                    continue
                atomics = [kind in (ATOMIC, FETCH_AND_ADD) for kind in (one_kind, other_kind)]
                if all(atomics) or one_kind == other_kind == READ:
                    continue
                pair = frozenset((one_site, other_site))
                result.setdefault(pair, set()).update(range(begin, end))
        return result


def run(program, **chosen):
    """Runs a program; returns the findings and the oracle's races."""
    oracle = Oracle()
    amounts = {}
    memory = np.zeros(BYTES, np.uint8)

    def copied(site, core, start, source, target, size, arrival, departure, kernel_core):
        """What a DMA does when it takes effect."""
        agent = ("dma", site)
        read = oracle.access(agent, READ, source, size, site, start)
        write = oracle.access(agent, WRITE, target, size, site)
        if departure is not None:
            oracle.signal(departure, size, read, True)
            amounts[read] = size
        oracle.signal(arrival, size, write, True)
        amounts[write] = size

    def body(core):
        base = core.buffer(0)
        me = core.index
        for position, (name, *details) in enumerate(program[me]):
            site = 100 * me + position
            match name:
                case "access":
                    kind, (begin, size) = details
                    yield from core.step(site)
                    core.access(kind, base + begin, size, site, 1)
                    oracle.access(me, kind, begin, size, site)
                case "fetch_and_add":
                    (begin,) = details
                    yield from core.fetch_and_add(base + begin, site)
                    cause = oracle.elements.get(begin)
                    causes = [] if cause is None else [cause]
                    event = oracle.access(me, FETCH_AND_ADD, begin, 4, site, *causes)
                    oracle.elements[begin] = event
                case "signal":
                    target, number, amount = details
                    yield from core.signal(core.semaphore(number, target), amount, site)
                    oracle.signal((target, number), amount, oracle.event(me))
                case "wait":
                    number, value = details
                    yield from core.wait(core.semaphore(number), value, site=site)
                    oracle.wait(me, (me, number), value)
                case "look":
                    number, value = details
                    yield from core.wait(core.semaphore(number), value, decrement=False, site=site)
                    oracle.wait(me, (me, number), value, take=False)
                case "count":
                    (number,) = details
                    yield from core.poll(core.semaphore(number), site)
                    oracle.count(me, (me, number), amounts)
                case "copy":
                    source, target, size, to, number, departs = details
                    arrival, departure = (to, number), (me, 0) if departs else None
                    yield from core.copy(
                        base + target,
                        base + source,
                        size,
                        core.semaphore(number, to),
                        core.semaphore(0) if departs else None,
                        site,
                    )
                    start = oracle.event(me)
                    core.kernel.on_copy[site] = lambda arguments=(
                        site, me, start, source, target, size, arrival, departure, core
                    ): copied(*arguments)  # fmt: skip

    made = Kernel(body, CORES, max_findings=10_000, fill="keep")
    try:
        with schedule(**chosen):
            record = made.launch(memory)
    finally:
        made.close()
    found = {}
    for finding in record["findings"]:
        if finding["kind"] == "Race":
            pair = frozenset((finding["first"]["site"], finding["second"]["site"]))
            touched = found.setdefault(pair, set())
            for begin, size in finding["memory"]["parts"]:
                touched.update(range(begin, begin + size))
    return found, oracle.races()


@settings(max_examples=300, deadline=None)
@given(programs, st.sampled_from(STRATEGIES), st.integers(0, 1000))
def test_races_found_are_those_of_the_oracle(program, strategy, seed):
    found, expected = run(program, strategy=strategy, seed=seed)
    for pair, touched in found.items():
        assert pair in expected, f"sites {sorted(pair)} are ordered"
        assert touched <= expected[pair], "bytes are named that both have not touched"
    racing = {byte for touched in expected.values() for byte in touched}
    covered = {byte for pair in found for byte in expected[pair]}
    assert racing == covered
