"""The governor: first fewer steps, then a smaller sample, and back when there is room."""

import pytest
import torch
from collage_agent.watching import governor as module
from collage_agent.watching.governor import Governor

from tests.agent.training import mlp, train, watched


class Clock:
    """The process's CPU clock, under control."""

    def __init__(self):
        self.seconds = 0.0

    def process_time(self):
        return self.seconds

    thread_time = perf_counter = process_time


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def run(governor, clock, measured, agent, rest):
    """Measured steps that cost `agent` seconds each beside `rest`; whether the sample shrank, each time."""
    shrunk = []
    for _ in range(measured):
        clock.seconds += rest
        with governor.timing():
            clock.seconds += agent
        shrunk.append(governor.adjust())
    return shrunk


def test_a_cost_above_the_budget_doubles_the_interval_and_room_brings_it_back(clock):
    governor = Governor(10, 4096, 0.01)
    assert governor.interval == 10
    run(governor, clock, 5, agent=0.05, rest=1.0)
    assert governor.interval == 10, "two steps warm up, four are judged"
    run(governor, clock, 1, agent=0.05, rest=1.0)
    assert governor.interval == 20
    run(governor, clock, 4, agent=0.05, rest=1.0)
    assert governor.interval == 40
    assert governor.overhead_ratio == pytest.approx(0.05)
    assert governor.agent_cpu_seconds == pytest.approx(0.5)
    run(governor, clock, 16, agent=0.001, rest=1.0)
    assert governor.interval == 10


@pytest.mark.parametrize(
    ("sample", "times", "left"), [(4096, 2, 1024), (1500, 1, 1024), (1024, 0, 1024), (64, 0, 64)]
)
def test_then_the_sample_is_halved_down_to_the_oracle_s(clock, sample, times, left):
    governor = Governor(1, sample, 0.01)
    shrunk = run(governor, clock, 60, agent=0.5, rest=1.0)
    assert governor.interval == 64
    assert governor.sample == left
    assert sum(shrunk) == times


def test_without_a_budget_nothing_changes(clock):
    governor = Governor(10, "all", None)
    assert not any(run(governor, clock, 50, agent=5.0, rest=1.0))
    assert governor.interval == 10


def test_the_worker_s_cpu_counts(clock):
    governor = Governor(10, 4096, 0.01, lambda: 3.0)
    clock.seconds = 13.0
    assert governor.overhead_ratio == pytest.approx(0.3)


@pytest.mark.parametrize(("process", "counted"), [(1.0, 1.0), (1.8, 1.8), (9.0, 2.0)])
def test_torch_s_threads_count_as_far_as_there_are_any(clock, monkeypatch, process, counted):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    of_this_thread = Clock()
    monkeypatch.setattr(clock, "thread_time", of_this_thread.process_time)
    governor = Governor(10, 4096, 0.01)
    with governor.timing():
        clock.seconds += process
        of_this_thread.seconds += 1.0
    assert governor.agent_cpu_seconds == pytest.approx(counted)


def test_a_smaller_sample_goes_on_measuring_with_the_oracle():
    model, optimizer, handle = watched(model=mlp(width=130), oracle=True, steps=3)
    assert handle.summary()["layers"]["2.weight"]["sampled"] == 4096
    handle._hooks[0].measurer.shrink_sample(1024)
    train(model, optimizer, 2, start=3)
    values = handle.summary()["layers"]["2.weight"]
    assert values["sampled"] == 1024
    assert values["oracle_steps"] == 5
    assert values["edq_oracle_ratio"] is not None
