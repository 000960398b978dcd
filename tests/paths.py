"""The paths of docs/architecture.md, traced as the code takes them: files entered, calls and SQL statements.

`python -m tests.paths` draws them into the page; `tests/end_to_end/test_paths.py` holds page and counts to them.
"""

import ast
import sys
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.waiting import until

__all__ = ["PAGE", "PATHS", "QUESTIONS", "Trace", "assert_calls", "page_with", "statements_of", "traced"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
ROOTS = (ROOT, ROOT / "agent", ROOT / "server")
"""Where the packages that are traced lie."""
CLIENT = threading.main_thread().name
PACKAGES = ("collage_agent", "collage_optim", "collage_monitor", "collage_server")
MOST_CALLS = 1.25
"""Times those recorded: a new helper passes, another pass over all layers does not."""


def assert_calls(calls, recorded):
    """Hold calls, counted by function or file, to their recorded number, which falls with them."""
    made = calls.total()
    assert made <= MOST_CALLS * recorded, f"{made} calls, {recorded} recorded, most of them {calls.most_common(20)}"
    assert recorded <= MOST_CALLS * made, f"{made} calls: lower the recorded number, {recorded}"


@dataclass
class Trace:
    """Calls of functions in the project's own packages, a file each time, in order."""

    calls: list[str] = field(default_factory=list)

    @property
    def files(self):
        """Every file entered, in the order of the first entry, and the calls of its functions."""
        return Counter(self.calls)


@contextmanager
def tracing(threads=lambda name: True, within=None):
    """The calls of this thread and of those begun inside, of which `threads` takes the names.

    within: notes only those that the last call of this function makes.
    """
    trace, named, live = Trace(), {}, within is None

    def file_of(code):
        path = code.co_filename
        if path not in named:
            ours = any(Path(path).is_relative_to(root / package) for root in ROOTS for package in PACKAGES)
            named[path] = str(Path(path).relative_to(ROOT)) if ours else None
        return named[path]

    def note(frame, kind, _):
        nonlocal live
        if within is not None and frame.f_code is within.__code__ and kind in {"call", "return"}:
            live = kind == "call"
            if live:
                trace.calls.clear()
        if kind != "call" or not live or frame.f_code.co_name == "<module>":
            return
        file = file_of(frame.f_code)
        if file is not None and threads(threading.current_thread().name):
            trace.calls.append(file)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


STEPS = 13


@contextmanager
def training(folder):
    """A run of 13 steps of two linear layers with biases, AdamW in bfloat16, every step measured, defaults else.

    Gives the run, and an iterator that prepares each step and gives what takes it.
    """
    import collage_agent as collage
    from collage_agent.transport import MemoryTransport

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())

    def steps():
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 64, dtype=torch.bfloat16)).square().mean().backward()
            yield optimizer.step

    with collage.init("paths", "step", dir=folder, transport=MemoryTransport()) as run:
        handle = collage.watch(model, optimizer, every=1, budget=None)
        yield run, steps()
        handle.remove()


def trace_step(folder):
    """The last step, on the training thread."""
    with training(folder) as (_, steps):
        for step in steps:
            with tracing(lambda name: name == CLIENT) as trace:
                step()
    return trace


def trace_worker(folder):
    """The last step, on the worker's thread: from what the queue gave to the acknowledgement of the transport.

    The queue keeps the newest step open for a while; when the others are gone, the run's end sends it alone. What
    the worker does between two such turns depends on time, and is left out.
    """
    from collage_agent.transport.envelope import WORKER_THREAD_NAME
    from collage_agent.transport.stream_sender import StreamSender

    with (
        tracing(lambda name: name == WORKER_THREAD_NAME, within=StreamSender.take) as trace,
        training(folder) as (run, steps),
    ):
        for step in steps:
            step()
        until(lambda: run.reports_sent >= STEPS - 1, "the delivery of all steps but the last")
    return trace


def _of_requests(name):
    """Whether a thread works for a request: not the client's, and none that works in the background."""
    return name != CLIENT and not name.startswith("collage-")


def _of_reports(name):
    """The same, and the writer, which commits."""
    return _of_requests(name) or name == "collage-writer"


@contextmanager
def serving(folder, threads=_of_requests):
    """A server on a folder with one run of five sealed steps and one that is not, a second later; it is traced."""
    from collage_server.app import create_app
    from collage_server.settings import Settings
    from starlette.testclient import TestClient

    from tests.server.conftest import Clock, Server
    from tests.server.migrated import put_migrated
    from tests.server.samples import report

    put_migrated(folder)
    clock = Clock()
    app = create_app(Settings(folder=folder, no_auth=True), clock=clock)
    with (
        tracing(threads) as trace,
        TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=True) as client,
    ):
        server = Server(client, clock, app)
        server.filled()
        while app.state.collage.store.sealing.seal("r1", clock.now, journal_full=True):
            pass
        server.reports([report(9, step=60)])
        app.state.collage.summariser.keep_points()
        yield server, trace


def trace_report(folder):
    """A report on its way in: from the request to the commit and the acknowledgement."""
    from tests.server.samples import report

    with serving(folder, _of_reports) as (server, trace):
        trace.calls.clear()
        server.reports([report(10, step=70)])
        return Trace(list(trace.calls))


def trace_heatmap(folder):
    """A heatmap that is asked for: of what is sealed and what is not, nothing cached."""
    with serving(folder) as (server, trace):
        trace.calls.clear()
        server.send("GET", QUESTIONS["heatmap"])
        return Trace(list(trace.calls))


PATHS = {"measured step": trace_step, "worker": trace_worker, "report": trace_report, "heatmap": trace_heatmap}
QUESTIONS = {
    "run": "/runs/r1",
    "heatmap": "/runs/r1/heatmap?metric=edq_ratio",
    "series": "/runs/r1/series?metric=edq_ratio",
    "compare": "/compare?run=r1&metric=edq_ratio",
    "latest": "/runs/r1/latest",
    "worst": "/runs/r1/worst?metric=edq_ratio&k=3",
    "metrics": "/metrics",
}


def traced(name):
    """The trace of one path, in a folder of its own that is gone afterwards. The first pass warms what imports."""
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            trace = PATHS[name](Path(folder))
    return trace


def statements_of(folder):
    """SQL statements of each question, asked once of a fresh server without what is kept, and of an overview."""
    from collage_server.summariser import evaluate

    from tests.server.statements import statements_on

    with serving(folder) as (server, _):
        store = server.app.state.collage.store
        found = {}
        with statements_on(store.engine) as asked:
            for name, question in QUESTIONS.items():
                asked.clear()
                server.send("GET", question)
                found[name] = len(asked)
            asked.clear()
            with store.points.snapshot() as now:
                evaluate(now, now.records(["r1"], before_points=True)["r1"])
            return found | {"overview": len(asked)}


def purpose_of(file):
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].removesuffix(".").replace("|", "\\|")


def table_of(trace):
    """The files of a path in order, and what each is for."""
    rows = [f"| {number} | `{file}` | {purpose_of(file)} |" for number, file in enumerate(trace.files, start=1)]
    return "\n".join(["| | file | what it is for |", "| --- | --- | --- |", *rows])


def page_with(traces):
    """The page with each trace's table between its markers."""
    text = PAGE.read_text(encoding="utf-8")
    for name, trace in traces.items():
        before, begin, rest = text.partition(f"<!-- traced: {name} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        assert begin, name
        assert end, name
        text = before + begin + table_of(trace) + end + after
    return text


def main():
    traces = {name: traced(name) for name in PATHS}
    PAGE.write_text(page_with(traces), encoding="utf-8")
    for name, trace in traces.items():
        sys.stdout.write(f"{name}: {len(trace.files)} files, {len(trace.calls)} calls\n")
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(f"SQL statements: {statements_of(Path(folder))}\n")


if __name__ == "__main__":
    main()
