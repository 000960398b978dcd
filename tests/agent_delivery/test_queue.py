"""The bounded queue: the oldest gives way, control items stay, both bounds hold."""

import threading
from dataclasses import dataclass

import pytest
from collage_agent.transport.queue import BoundedQueue


@dataclass(frozen=True)
class Item:
    number: int
    size_bytes: int = 1


def numbers(queue, limit=100):
    return [item.number for item in queue.take(limit)]


def test_first_in_first_out_in_portions():
    queue: BoundedQueue[Item] = BoundedQueue(10, 100)
    for number in range(5):
        queue.put(Item(number))
    assert numbers(queue, 2) == [0, 1]
    assert numbers(queue) == [2, 3, 4]
    assert (numbers(queue), len(queue), queue.dropped) == ([], 0, 0)


def test_the_oldest_gives_way_to_the_newest():
    queue: BoundedQueue[Item] = BoundedQueue(3, 100)
    for number in range(8):
        queue.put(Item(number))
    assert queue.dropped == 5
    assert numbers(queue) == [5, 6, 7]


def test_bytes_are_bounded_too():
    queue: BoundedQueue[Item] = BoundedQueue(100, 10)
    for number in range(6):
        queue.put(Item(number, 4))
    assert queue.dropped == 4
    assert numbers(queue) == [4, 5]
    queue.put(Item(6, 11))
    assert (numbers(queue), queue.dropped) == ([], 5)


def test_control_items_are_never_dropped_and_take_no_place():
    queue: BoundedQueue[Item] = BoundedQueue(3, 100)
    queue.put(Item(0))
    queue.put(Item(1, 0))
    for number in range(2, 9):
        queue.put(Item(number))
    assert numbers(queue) == [1, 6, 7, 8]
    assert queue.dropped == 5


def test_a_first_item_ends_the_wait_and_so_does_the_end():
    queue: BoundedQueue[Item] = BoundedQueue(10, 100)
    taken = []

    def consume():
        queue.wait_for_items(0.0, 60.0)
        taken.extend(numbers(queue))
        queue.wait_for_items(60.0, 60.0)
        taken.append("woken")

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    queue.put(Item(7))
    while not taken:
        pass
    queue.wake()
    consumer.join(10)
    assert taken == [7, "woken"]


@pytest.mark.parametrize("full", [5, 10])
def test_a_half_full_queue_does_not_wait_for_company(full):
    queue: BoundedQueue[Item] = BoundedQueue(10, 100)
    for number in range(full):
        queue.put(Item(number))
    queue.wait_for_items(60.0, 60.0)
    assert numbers(queue) == list(range(full))
