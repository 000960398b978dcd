"""Waiting in tests: for a condition, never for a time.

A busy machine may take a hundred times as long as a quiet one, so nothing here or elsewhere says how fast something
is: a deadline only keeps what will never happen from waiting for ever.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

__all__ = ["PATIENCE_SECONDS", "at_once", "beside", "until"]

PATIENCE_SECONDS = 300.0
"""How long a test waits for what should happen at once: a program that compiles took 240 beside four busy loops."""


_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.1
_LONGER = 1.2


def until(condition, what="it"):
    """Wait until `condition()` is true and return its answer; say what was waited for where it never is.

    It asks ever less often: a question that costs what it waits for would hold that up.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {PATIENCE_SECONDS:.0f} seconds")
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE_SECONDS, _LONGER * pause)
    return answer


def at_once(*calls):
    """What the calls return, each in a thread of its own; raises what one of them raises."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [called.result() for called in [threads.submit(call) for call in calls]]


@contextmanager
def beside(call):
    """Meanwhile the call is made again and again, in a thread of its own; raises what it raises."""
    done = threading.Event()

    def again():
        while not done.is_set():
            call()

    with ThreadPoolExecutor(1) as thread:
        called = thread.submit(again)
        try:
            yield
        finally:
            done.set()
        called.result()
