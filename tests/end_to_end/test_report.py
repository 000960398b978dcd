"""The report on a run that never met a server, from what it left on disk; and on one that has no step yet."""

import json

import collage_agent as collage
import pytest
from click.testing import CliRunner
from collage_dashboard.html_report import report as rendered
from collage_dashboard.report_command import report
from collage_dashboard.server_reader import Reader

from collage_monitor.client import Client
from collage_monitor.local import read_token
from tests.end_to_end.trainings import train

pytestmark = pytest.mark.slow


def test_an_offline_run_is_reported_and_can_still_be_sent(tmp_path, monkeypatch):
    # A server that the environment names is not this one.
    monkeypatch.setenv("COLLAGE_SERVER_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("COLLAGE_TOKEN", "the-token-of-another-server-that-is-long-enough")
    done = train("--steps", 20, mode="offline", dir=tmp_path, run_name="far away", every=1)
    assert done.status == 0, done.errors
    before = {path: path.read_bytes() for path in (tmp_path / "spool").rglob("*.spool")}
    assert before
    written = tmp_path / "report.html"
    said = CliRunner().invoke(report, ["--offline", "--dir", str(tmp_path), "--output", str(written), "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.output)["runs"] == ["far away"]
    html = written.read_text(encoding="utf-8")
    assert "<h1>far away</h1>" in html
    assert "finished, step 20" in html
    assert "Updates lost by layer" in html
    assert {path: path.read_bytes() for path in (tmp_path / "spool").rglob("*.spool")} == before


def test_a_run_before_its_first_step_has_a_report(server):
    run = collage.init(project="p", name="new", server_url=server.url, dir=server.folder)
    collage.finish()
    with Client(server.url, read_token(server.folder)) as client:
        assert "no measured step yet" in rendered(Reader(lambda: client), [run.run_id])
