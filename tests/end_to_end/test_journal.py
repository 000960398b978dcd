"""The journal is bounded: what a server has no room for waits with the agent, and is stored once there is some."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import uvicorn
from collage_server.app import create_app
from collage_server.settings import FixedLimits, Settings

from collage_monitor.client import Client
from tests.agent_delivery.doubles import QUICK, make_run, measurement
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow

BOUND = 40_000
REPORTS = 150


@contextmanager
def served(app):
    """The application behind a socket, in a thread of this process."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "the server")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def test_what_finds_no_room_is_spooled_and_stored_once_sealing_goes_on(tmp_path):
    settings = Settings(folder=tmp_path / "data", no_auth=True)
    app = create_app(settings, limits=FixedLimits(journal_run_bytes=BOUND, seal_interval_seconds=1e6))
    app_state = app.state.collage
    sealer = app_state.sealer
    work, sealer.do_due_work = sealer.do_due_work, lambda: None
    with served(app) as url:
        run = make_run(
            tmp_path / "agent",
            server_url=url,
            run_id="r",
            project="p",
            limits=replace(
                QUICK,
                connect_timeout_seconds=PATIENCE_SECONDS,
                answer_timeout_seconds=PATIENCE_SECONDS,
                finish_seconds=PATIENCE_SECONDS,
            ),
        )
        for step in range(1, REPORTS + 1):
            run.measured(measurement(step))
            if step == 1:
                until(lambda: run.reports_sent == 1, "the first report, so that the rest is no single batch")
        until(lambda: run.reports_spooled > 0, "the first report that found no room")
        assert app_state.store.journal.bytes_of("r") <= BOUND
        sealer.do_due_work = work
        sealer.wake()
        run.finish(seconds=PATIENCE_SECONDS)
        with Client(url, None) as client:
            series = client.series("r", "grad_norm", points=1000)
            [stream] = client.streams("r").streams
            assert series.steps == list(range(1, REPORTS + 1))
            assert (stream.reports, stream.missing, stream.given_up) == (run.reports_sent, 0, 0)
        assert run.reports_dropped == {}
