"""Doubles of the delivering side's surroundings: measurements without a model, and a server that misbehaves."""

import gzip
import json
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from collage_agent.launch.identity import make_identity
from collage_agent.measurement import Layout, Measurement
from collage_agent.run import Run
from collage_agent.run_settings import DeliveryLimits, read_settings
from collage_agent.transport import MemoryTransport
from collage_agent.transport.sender import send_folder

from collage_monitor.wire import Layer, WatchInfo, decode_batch
from tests.waiting import PATIENCE_SECONDS

STATISTICS = ("elements", "sampled", "intended_squared_sum")
QUICK = DeliveryLimits(
    linger_seconds=0.01,
    step_seconds=0.02,
    connect_timeout_seconds=0.5,
    answer_timeout_seconds=0.5,
    retry_seconds=0.3,
    first_pause_seconds=0.05,
    longest_pause_seconds=0.2,
    finish_seconds=10.0,
)
NO_ENVIRONMENT: dict[str, str] = {}


def layout(names=("a", "b"), statistics=STATISTICS, optimizer="SGD"):
    layers = tuple(Layer(name=name, shape=[4], dtype="bfloat16", elements=4) for name in names)
    return Layout(layers, tuple(statistics), WatchInfo(optimizer=optimizer))


def measurement(step, shape=None, totals=None):
    shape = layout() if shape is None else shape
    size = (len(shape.statistics), len(shape.layers))
    block = np.arange(size[0] * size[1], dtype=np.float64).reshape(size) + step if totals is None else totals
    return Measurement(shape, step, 1000.0 + step, torch.from_numpy(block), {"agent_cpu_seconds": 0.5})


def settings(folder, *, limits=QUICK, **arguments):
    made = read_settings(NO_ENVIRONMENT, dir=folder, **arguments)
    return type(made)(**{**made.__dict__, "limits": limits})


def make_run(folder, transport=None, *, limits=QUICK, **arguments):
    chosen = settings(folder, limits=limits, **arguments)
    identity = make_identity(chosen.run_id, environment=NO_ENVIRONMENT, role=chosen.second_role)
    return Run(chosen, identity, transport)


def arrived(folder):
    """A server in memory, with what waits in the folder sent to it."""
    transport = MemoryTransport()
    send_folder(folder, transport, 0.0)
    return transport


def of_kind(transport, kind):
    return [message for message in transport.messages if isinstance(message, kind)]


def log_steps(run, first, last):
    for step in range(first, last + 1):
        run.log({"loss": 1.0}, step=step)


def ended_run(folder, steps, **arguments):
    """A run that has logged so many steps and is over."""
    run = make_run(folder, **arguments)
    log_steps(run, 1, steps)
    run.finish()
    return run


class Scripted(MemoryTransport):
    """Raises what its script says for the next messages, None where it takes one."""

    def __init__(self, *script):
        super().__init__()
        self.script = list(script)

    def send(self, envelope, wait):
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        return super().send(envelope, wait)


class ServerDouble:
    """A small server over real HTTP that keeps reports once and can be told to misbehave.

    `script` holds what the next requests get instead of an answer: a status, (status, headers), "hang", "garbage"
    or "cut" (takes the reports, then drops the connection). `always` holds for every request.
    """

    def __init__(self, port=0):
        self.script: list[Any] = []
        self.always: Any = None
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.moments: list[float] = []
        self.stored: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self.released = threading.Event()
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.reply(200, {"status": "ok", "version": "1"})

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                double.moments.append(time.monotonic())
                double.requests.append((self.command, self.path, dict(self.headers), body))
                double.answer(self, body)

            def do_PATCH(self):
                self.do_POST()

            def reply(self, status, answer, headers=()):
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.http.block_on_close = False
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http.server_port}"

    @property
    def paths(self):
        return [path for _, path, _, _ in self.requests]

    def steps(self):
        return [report.step for reports in self.stored.values() for report in reports.values()]

    def answer(self, handler, body):
        order = self.script.pop(0) if self.script else self.always
        if order == "hang" or self.released.is_set():
            self.released.wait(PATIENCE_SECONDS)
            handler.close_connection = True
        elif order == "garbage":
            handler.reply(200, b"<html>welcome</html>")
        elif order == "cut":
            self.store(handler.path, body)
            handler.close_connection = True
        elif order is not None:
            status, headers = order if isinstance(order, tuple) else (order, ())
            handler.reply(status, {"error": {"code": "told_so", "message": "as the script says"}}, headers)
        else:
            handler.reply(200, self.store(handler.path, body))

    def store(self, path, body):
        if not path.endswith("/reports"):
            return {}
        known = self.stored[path]
        reports = decode_batch(body).reports
        fresh = [report for report in reports if report.seq not in known]
        known.update({report.seq: report for report in fresh})
        return {"accepted": len(fresh), "duplicates": len(reports) - len(fresh), "rejected": []}

    def close(self):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


class HandleDouble:
    """A watch as far as a run asks one: its step, and what it says when printed."""

    def __init__(self, step=None):
        self.step = step

    def look(self):
        """Every step is seen."""

    def __str__(self):
        return "the verdict"
