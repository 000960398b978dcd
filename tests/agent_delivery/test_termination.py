"""SIGTERM with real processes: what was logged is kept, and the process ends as it would without the agent."""

import os
import signal
import textwrap

import pytest

from collage_monitor.wire import RunUpdate
from tests.agent_delivery.doubles import arrived, of_kind
from tests.forking import TRAINING, fork
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

BEGIN = """
import os, signal, sys, threading, time
import collage_agent as collage
{before}
collage.init(run_id="ended")
for step in range(1, 51):
    collage.log({{"loss": 1.0}}, step=step)
{after}
print("ready", flush=True)
{loop}
"""
IN_PYTHON = "while True: time.sleep(0.01)"
# Locked twice from C: a wait that a signal does not interrupt, as of a rank inside a collective.
IN_NATIVE_CODE = """
import ctypes
lock = ctypes.CDLL(None).pthread_mutex_lock
mutex = ctypes.create_string_buffer(64)
lock(mutex)
lock(mutex)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a training process and waits until it has logged 50 steps; what still lives at the end is killed."""
    processes = []

    def begin(before="", after="", loop=IN_PYTHON, mode="offline", address=""):
        parts = {"before": before, "after": after, "loop": loop}
        code = BEGIN.format(**{name: textwrap.dedent(part) for name, part in parts.items()})
        settings = {"DIR": str(tmp_path), "MODE": mode, "SERVER_URL": address}
        environment = {**os.environ, **{f"COLLAGE_{key}": text for key, text in settings.items()}}
        process = fork(TRAINING, "-c", code, environment=environment)
        processes.append(process)
        assert "ready\n" in iter(process.stdout.readline, "")
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def end(process):
    """Send the signal; the status is the signal's."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM


TRAININGS = {
    "python": {},
    "native code": {"loop": IN_NATIVE_CODE},
    "the end of the program waits for what is sent after the signal": {
        "before": """
        from collage_agent.run import Run
        stop, begun = Run.stop, threading.Event()
        def note_and_stop(*arguments):
            begun.set()
            stop(*arguments)
        Run.stop = note_and_stop
        """,
        "loop": "begun.wait()",
    },
    "children have the signal's plain meaning and leave the parent alone": {
        "after": """
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"y" if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else b"n")
            while True:
                signal.pause()
        assert os.read(reader, 1) == b"y"
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        """,
    },
    "an event loop keeps its wakeup descriptor": {
        "before": """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        """,
        "after": "assert signal.set_wakeup_fd(writer) == writer",
    },
}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_what_is_queued_is_kept_and_the_status_is_the_signals(start, tmp_path, training):
    end(start(**training))
    transport = arrived(tmp_path)
    assert [report.step for report in transport.reports] == list(range(1, 51))
    assert of_kind(transport, RunUpdate) == []


def test_the_queue_is_kept_when_the_main_thread_holds_its_lock(start, tmp_path):
    process = start(
        after="""
        from collage_agent.transport.queue import BoundedQueue
        make_room = BoundedQueue._make_room
        def and_the_signal_comes(queue):
            os.kill(os.getpid(), signal.SIGTERM)
            make_room(queue)
        BoundedQueue._make_room = and_the_signal_comes
        """,
        loop="collage.log({'loss': 1.0}, step=51)\n" + IN_PYTHON,
    )
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM
    assert [report.step for report in arrived(tmp_path).reports] == list(range(1, 52))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_training_keeps_the_signal(start, tmp_path, when):
    own = """
    def end(number, frame):
        print("saving a checkpoint", flush=True)
        sys.exit(7)
    signal.signal(signal.SIGTERM, end)
    """
    process = start(**{when: own})
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, output.count("saving")) == (7, 1)
    transport = arrived(tmp_path)
    assert [report.step for report in transport.reports] == list(range(1, 51))


def test_a_handler_that_calls_the_one_before_it_goes_on(start, tmp_path):
    process = start(
        after="""
        earlier = signal.getsignal(signal.SIGTERM)
        def end(number, frame):
            if callable(earlier):
                earlier(number, frame)
            print("still here", flush=True)
        signal.signal(signal.SIGTERM, end)
        """,
    )
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "still here\n"


def test_an_ignored_signal_stays_ignored(start, tmp_path):
    process = start(
        before="""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGRTMIN, lambda number, frame: print("still here", flush=True))
        """,
    )
    # Of signals that wait together the lower number comes first, so the answer is given after SIGTERM.
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGRTMIN)
    assert process.stdout.readline() == "still here\n"


def test_finishing_gives_the_signal_back(start):
    start(
        after="""
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        collage.finish()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        for thread in set(threading.enumerate()) - {threading.main_thread()}:
            thread.join(60)
            assert not thread.is_alive(), thread
        collage.init(mode="disabled")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        """,
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            """
            before = collage.init
            def on_a_thread(**arguments):
                thread = threading.Thread(target=before, kwargs=arguments)
                thread.start()
                thread.join()
            collage.init = on_a_thread
            """,
            "",
        ),
        (
            "os.environ['COLLAGE_EXIT_HOOKS'] = 'off'; plain = sys.exit, type(exit).__call__",
            "assert plain == (sys.exit, type(exit).__call__)",
        ),
    ],
    ids=["begun on another thread", "by the user's wish"],
)
def test_a_run_may_leave_the_signal_and_the_exits_alone(start, before, after):
    end(start(before, "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n" + after))


def test_the_server_gets_it_when_it_is_there(start, tmp_path, server):
    end(start(mode="online", address=server.url))
    assert sorted(server.steps()) == list(range(1, 51))
    assert list(tmp_path.glob("spool/*")) == []
