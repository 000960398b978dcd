"""Trainings side by side: a failing one is named, and those still running are ended."""

import signal
import sys
import threading
import traceback
from concurrent.futures import _base

import click
import pytest
from collage_demo.pool import WorkerPool
from collage_demo.recipe import Plan, Recipe
from collage_demo.worker import DemoTask, FinalLine

from tests.waiting import PATIENCE_SECONDS, until


def job_of(folder, plan="plain"):
    return DemoTask(Plan(plan, "bfloat16"), Recipe(steps=1), "g", "http://127.0.0.1:9", folder)


@pytest.mark.slow
def test_a_failed_training_is_named(tmp_path):
    lines = []
    with (
        WorkerPool(FinalLine, lambda *line: lines.append(line)) as team,
        pytest.raises(click.ClickException, match="no-such-strat"),
    ):
        team.run([job_of(tmp_path, "no-such-strategy")])
    assert lines == []


def test_a_signal_that_comes_just_before_the_wait_ends_it(tmp_path, monkeypatch):
    """Such a signal does not wake the main thread; neither does one that another thread takes, as here."""
    main, interrupted, seen = threading.get_ident(), threading.Event(), []

    def waits():
        callers = [frame.filename for frame in traceback.extract_stack(sys._current_frames()[main])]
        return callers[-1] == threading.__file__ and callers[-3] == _base.__file__

    def interrupt(*_):
        interrupted.set()
        raise KeyboardInterrupt

    def watch(_pool, _task):
        until(waits, "the main thread waits for the training")
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        seen.append(interrupted.wait(PATIENCE_SECONDS))

    monkeypatch.setattr(WorkerPool, "_watch", watch)
    former = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), WorkerPool(FinalLine, lambda *_: None) as team:
            team.run([job_of(tmp_path)])
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert seen == [True]
