"""Who is next: equal shares of tokens for every flow, in order within one."""

import gc
import weakref

from atoll.teacher.fair_queue import FairQueue, length_class
from hypothesis import given
from hypothesis import strategies as st


def taken(queue: FairQueue[str], count: int = 1_000) -> list[str]:
    names: list[str] = []
    while len(names) < count and (name := queue.head(lambda _: True)) is not None:
        queue.pop()
        names.append(name)
    return names


def test_short_sequences_pass_between_long_ones_that_were_there_before() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push("long", 1_000, f"L{number}")
    for number in range(10):
        queue.push("short", 100, f"s{number}")
    order = taken(queue)
    # A thousand tokens of one flow, then a thousand of the other.
    assert order == ["L0", *(f"s{n}" for n in range(10)), "L1", "L2", "L3"]


def test_a_long_sequence_is_not_starved_by_short_ones_that_keep_coming() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("long", 1_000, "L0")
    queue.push("long", 1_000, "L1")
    order: list[str] = []
    while len(order) < 30:
        queue.push("short", 100, "s")
        order += taken(queue, 1)
    assert order[0] == "L0"
    assert 10 <= order.index("L1") <= 12


def test_a_flow_that_was_idle_gets_no_credit_for_it() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(50):
        queue.push("busy", 100, f"b{number}")
    taken(queue, 40)
    for number in range(50):
        queue.push("new", 100, f"n{number}")
    assert sum(name.startswith("n") for name in taken(queue, 10)) == 5


def test_items_that_are_not_alive_any_more_are_dropped() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("a", "b", "c"):
        queue.push("flow", 1, name)
    assert queue.head(lambda name: name == "c") == "c"
    assert taken(queue) == ["c"]


class Caller:
    """Stands for all that one call holds."""


def test_a_flow_that_has_nothing_waiting_is_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    callers = []
    for number in range(50):
        caller = Caller()
        callers.append(weakref.ref(caller))
        queue.push((caller, 0), 10, f"c{number}")
        assert taken(queue) == [f"c{number}"]
    del caller
    gc.collect()
    assert [each() for each in callers] == [None] * 50


def test_lengths_have_classes_that_double() -> None:
    assert [length_class(n) for n in (1, 256, 257, 512, 513, 1_024, 1_025, 8_192)] == [0, 0, 1, 1, 2, 2, 3, 5]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5_000)), max_size=60))
def test_every_item_comes_once_and_flows_keep_their_order(pushed: list[tuple[str, int]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number, (flow, tokens) in enumerate(pushed):
        queue.push(flow, tokens, (flow, number))
    order = []
    while (item := queue.head(lambda _: True)) is not None:
        queue.pop()
        order.append(item)
    assert sorted(order, key=lambda item: item[1]) == [(flow, n) for n, (flow, _) in enumerate(pushed)]
    for flow in "abc":
        numbers = [number for name, number in order if name == flow]
        assert numbers == sorted(numbers)
