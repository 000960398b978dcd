"""The bounded queue: a step's items stay together, the oldest step gives way, control items stay, bounds hold."""

import math
import threading

import pytest
from collage_agent.transport.queue import (
    AttemptStart,
    BoundedQueue,
    LoggedScalars,
    StepItems,
    not_finite_since,
)
from collage_agent.transport.report_counts import ReportCounts

from tests.waiting import PATIENCE_SECONDS

SMALL = 1024
"""The size of an item with one scalar."""


def logged(step, **values):
    return LoggedScalars(step, 1000.0, values or {"loss": 1.0})


def queue_of(steps=10, size_bytes=100 * SMALL, open_seconds=60.0):
    counts = ReportCounts()
    return BoundedQueue(steps, size_bytes, open_seconds, counts), counts


def put(queue, steps):
    for step in steps:
        queue.put(logged(step))


def taken(queue, limit=100):
    return [[item.step for item in entry.items] for entry in queue.take(limit)]


def test_first_in_first_out_in_portions_and_the_newest_step_stays():
    queue, counts = queue_of()
    put(queue, range(5))
    assert taken(queue, 2) == [[0], [1]]
    assert taken(queue) == [[2], [3]]
    assert (taken(queue), len(queue), counts.made) == ([], 1, 5)
    queue.wake()
    assert taken(queue) == [[4]]


def test_items_of_one_step_stay_together_however_slowly_they_come():
    queue, counts = queue_of()
    for name in ("loss", "rate", "tokens"):
        queue.put(logged(1, **{name: 1.0}))
        assert taken(queue) == []
    queue.put(logged(2))
    assert taken(queue) == [[1, 1, 1]]
    assert counts.made == 2


def test_a_step_that_nothing_follows_is_complete_after_a_while():
    queue, _ = queue_of(open_seconds=0.0)
    queue.put(logged(1))
    assert taken(queue) == [[1]]


def test_the_oldest_step_gives_way_to_the_newest():
    queue, counts = queue_of(steps=3)
    for step in range(8):
        put(queue, [step, step])
    assert (counts.made, counts.pending, counts.dropped) == (8, 3, {"queue_full": 5})
    queue.wake()
    assert taken(queue) == [[5, 5], [6, 6], [7, 7]]


def test_bytes_are_bounded_too():
    queue, counts = queue_of(size_bytes=2 * SMALL)
    put(queue, range(6))
    assert counts.dropped == {"queue_full": 4}
    queue.wake()
    assert taken(queue) == [[4], [5]]
    queue.put(logged(6, **{f"s{number}": 1.0 for number in range(10)}))
    assert (taken(queue), counts.dropped) == ([], {"queue_full": 5})


def test_what_was_taken_makes_room():
    queue, counts = queue_of(size_bytes=3 * SMALL)
    for step in range(20):
        queue.put(logged(step))
        queue.take(100)
    assert counts.dropped == {}


def test_control_items_are_never_dropped_nor_counted_and_stay_in_their_order():
    queue, counts = queue_of(steps=3)
    queue.put(logged(0))
    for first_step in (1, 2):
        queue.put(AttemptStart(first_step))
    put(queue, range(2, 9))
    assert (counts.made, counts.dropped) == (8, {"queue_full": 5})
    queue.wake()
    assert [entry.items[0].first_step for entry in queue.take(2)] == [1, 2]
    assert taken(queue) == [[6], [7], [8]]


def test_a_second_step_ends_the_wait_and_so_does_the_end():
    queue, _ = queue_of()
    found = []

    def consume():
        queue.wait_for_steps(0.0, 60.0)
        found.extend(taken(queue))
        queue.wait_for_steps(60.0, 60.0)
        found.append("woken")

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    put(queue, [7, 8])
    while not found:
        pass
    queue.wake()
    consumer.join(PATIENCE_SECONDS)
    assert found == [[7], "woken"]


@pytest.mark.parametrize(("steps", "size", "full"), [(10, 100, 5), (10, 100, 10), (100, 20, 10)])
def test_a_queue_half_full_of_steps_or_bytes_does_not_wait_for_company(steps, size, full):
    queue, _ = queue_of(steps, size * SMALL)
    put(queue, range(full))
    forever = 100 * PATIENCE_SECONDS
    waits = threading.Thread(target=queue.wait_for_steps, args=(forever, forever), daemon=True)
    waits.start()
    waits.join(PATIENCE_SECONDS)
    assert not waits.is_alive()
    assert taken(queue) == [[step] for step in range(full - 1)]


def test_of_values_that_are_joined_the_last_of_each_name_counts():
    first, later = StepItems(), StepItems()
    for values in ({"loss": 1.0}, {"rate": 2.0, "loss": 3.0}):
        first.add(logged(1, **values))
    later.add(logged(1, loss=4.0))
    first.join(later, 64)
    assert [getattr(item, "values", None) for item in first.items] == [{"rate": 2.0, "loss": 3.0}, {"loss": 4.0}]
    assert first.size_bytes == sum(item.size_bytes for item in first.items)


@pytest.mark.parametrize(
    ("value", "since", "found"),
    [(math.nan, math.nan, 5.0), (math.inf, 3.0, 3.0), (1.0, 3.0, math.nan), (1.0, math.nan, math.nan)],
)
def test_a_value_is_not_finite_since_the_first_step_at_which_it_was_not(value, since, found):
    assert not_finite_since(value, 5, since) == pytest.approx(found, nan_ok=True)
