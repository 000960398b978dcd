"""What reporting costs the training thread: 500 numbers handed over, beside sending them on that thread.

`python -m benchmarks.deliver`: wall time of the calling thread for one step's report, a median over many steps for
each round. The gate compares handing over with sending, so it holds on any machine.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import truediv
from pathlib import Path
from statistics import median
from threading import Thread

import torch
from collage_agent.launch.identity import make_identity
from collage_agent.measurement import Layout, Measurement
from collage_agent.run import Run
from collage_agent.run_settings import DeliveryLimits, Settings
from collage_agent.transport import Envelope, HttpTransport, MemoryTransport

from benchmarks._harness import Figure, Measuring, Options, main
from collage_monitor.metrics import STATISTICS
from collage_monitor.wire import BatchAnswer, Layer, Report, ReportBatch, WatchInfo, array_to_bytes, encode_json

SHARE_ALLOWED = 0.05
STEPS = 300
LAYERS = 25
STATISTIC_COUNT = 20


def measure(options: Options) -> Measuring:
    """Rounds of each alternative, in turn."""
    rounds = options.rounds or (3 if options.gate else 5)
    yield from handing_over(rounds)
    if not options.gate:
        yield Figure("logged, ten scalars", "ms", tuple(1e3 * logged() for _ in range(rounds)))
        yield from mirroring(rounds)
    return [f"{LAYERS} layers × {STATISTIC_COUNT} statistics = 500 numbers, {STEPS} steps a round"]


def handing_over(rounds: int) -> list[Figure]:
    """A report handed over, over the same one sent by the caller, which is the first figure, and both."""
    ours, sent = [], []
    for _ in range(rounds):
        ours.append(1e3 * handed_over())
        sent.append(1e3 * sent_by_the_caller())
    return [
        Figure("a report handed over / sent by the caller", "×", tuple(map(truediv, ours, sent)), SHARE_ALLOWED),
        Figure("a report handed over", "ms", tuple(ours)),
        Figure("a report sent by the caller", "ms", tuple(sent)),
    ]


def mirroring(rounds: int) -> list[Figure]:
    """The extra time of a TensorBoard mirror when a report is handed over, on the training thread."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(handed_over(f"tensorboard:{folder}/{n}"), handed_over()) for n in range(rounds)]
    return [
        Figure("a report handed over, with a mirror", "ms", tuple(1e3 * ours for ours, _ in pairs)),
        Figure("what the mirror adds", "ms", tuple(1e3 * (ours - without) for ours, without in pairs)),
    ]


def handed_over(*mirrors: str) -> float:
    """Seconds for `measured` of a run whose worker delivers beside it."""
    layout, totals = _layout(), torch.ones(STATISTIC_COUNT, LAYERS, dtype=torch.float64)

    def report(run: Run, step: int) -> None:
        run.measured(Measurement(layout, step, 1.0, totals, {"agent_cpu_seconds": 0.5}))

    return _in_a_run(report, mirrors)


def logged() -> float:
    """Seconds for `log` of ten numbers, one of them a tensor."""
    values = {f"scalar_{number}": float(number) for number in range(9)} | {"loss": torch.tensor(1.0)}
    return _in_a_run(lambda run, step: run.log(values, step=step))


def sent_by_the_caller() -> float:
    """Seconds for building the same report and sending it over a local connection, as a simple logger does."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answering)
    Thread(target=server.serve_forever, daemon=True).start()
    transport = HttpTransport(f"http://127.0.0.1:{server.server_port}", lambda: None, DeliveryLimits())
    totals = torch.ones(STATISTIC_COUNT, LAYERS, dtype=torch.float64)
    taken = []
    for step in range(STEPS):
        began = time.perf_counter()
        block = totals.numpy()
        report = Report(
            seq=step,
            step=step,
            time=1.0,
            statistic_count=STATISTIC_COUNT,
            layer_count=LAYERS,
            statistics=array_to_bytes(block),
            model=array_to_bytes(block.sum(axis=1)),
        )
        transport.send(Envelope("p", "r", "s", ReportBatch(reports=[report])), lambda seconds: True)
        taken.append(time.perf_counter() - began)
    transport.close()
    server.shutdown()
    server.server_close()
    return median(taken)


def _in_a_run(report: Callable[[Run, int], None], mirrors: tuple[str, ...] = ()) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            Settings(project="benchmark", run_id="benchmark", folder=Path(folder), mirrors=mirrors),
            make_identity("benchmark", environment={}),
            MemoryTransport(),
        )
        run.started(1)
        taken = []
        for step in range(1, STEPS + 1):
            began = time.perf_counter()
            report(run, step)
            taken.append(time.perf_counter() - began)
            # A step of training, during which the worker has its turn.
            time.sleep(0.001)
        run.finish()
        assert run.reports_sent == STEPS, run.reports_dropped
    return median(taken)


def _layout() -> Layout:
    layers = tuple(
        Layer(name=f"layer.{number}", shape=[64, 64], dtype="bfloat16", elements=4096) for number in range(LAYERS)
    )
    return Layout(layers, tuple(_statistics()), WatchInfo(optimizer="AdamW"))


def _statistics() -> list[str]:
    """Keys of totals that take no label."""
    return [name for name, statistic in STATISTICS.items() if statistic.label is None][:STATISTIC_COUNT]


class _Answering(BaseHTTPRequestHandler):
    """A server that takes every request."""

    protocol_version = "HTTP/1.1"
    # Send an answer as one packet: otherwise TCP's delayed acknowledgement would add 40 ms.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        answer = encode_json(BatchAnswer(accepted=1, duplicates=0))
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: object) -> None:
        """A benchmark logs no request."""


if __name__ == "__main__":
    sys.exit(main("deliver", "What reporting costs the training thread.", measure))
