"""What is stopped first when the application ends."""

from __future__ import annotations

from threading import Event

from collage_server.app import create_app
from collage_server.background import BackgroundThread
from collage_server.settings import FixedLimits, Settings
from starlette.testclient import TestClient

from tests.server.migrated import put_migrated


class HangingMessages(BackgroundThread):
    """An alert thread whose webhook answers only once `answered` is set."""

    def __init__(self):
        super().__init__("hanging", interval_seconds=0.001)
        self.asked = Event()
        self.answered = Event()

    def do_due_work(self):
        self.asked.set()
        self.answered.wait()


def test_a_webhook_that_hangs_takes_no_time_from_what_waits_to_be_committed(tmp_path, monkeypatch):
    put_migrated(tmp_path)
    app = create_app(Settings(folder=tmp_path, no_auth=True), limits=FixedLimits(shutdown_seconds=0.5))
    writer, hanging, left = app.state.collage.writer, HangingMessages(), []
    stop = writer.stop

    async def recorded(deadline_seconds):
        left.append(deadline_seconds)
        await stop(deadline_seconds)

    monkeypatch.setattr(writer, "stop", recorded)
    app.state.alert_threads = [hanging]
    try:
        with TestClient(app):
            assert hanging.asked.wait(60)
        assert left[0] > 0.0
    finally:
        hanging.answered.set()
