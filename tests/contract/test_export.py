"""The verbs `export` and `import`: whole files or none, formats by ending, errors as sentences."""

import json
from functools import partial

import httpx
import pytest
from click.testing import CliRunner

from collage_monitor.client import Client
from collage_monitor.command import server
from collage_monitor.command.transfer import export, import_run
from collage_monitor.errors import CollageError, ServerUnreachable
from collage_monitor.importing import ImportRefusal
from tests.contract.test_client import RUN

LINES = b'{"kind":"run"}\n{"kind":"end","steps":0}\n'


@pytest.fixture
def served(monkeypatch, tmp_path):
    """Sets what the server answers; returns the requests that it saw."""
    monkeypatch.setenv("COLLAGE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    seen = []

    def serve(answer):
        def handle(request):
            if request.method == "GET" and request.url.path == "/api/v1/runs/r1":
                return httpx.Response(200, json={**RUN, "run_id": "r1"})
            seen.append(request)
            return answer(request) if callable(answer) else answer

        monkeypatch.setattr(server, "Client", partial(Client, transport=httpx.MockTransport(handle)))
        return seen

    return serve


def test_export_writes_the_answer_under_the_run_s_name(served, tmp_path):
    seen = served(httpx.Response(200, content=LINES, headers={"Collage-Lines": "2"}))
    result = CliRunner().invoke(export, ["r1"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "r1.jsonl").read_bytes() == LINES
    assert seen[0].url.path == "/api/v1/runs/r1/export"
    assert dict(seen[0].url.params) == {"format": "jsonl", "layers": "true", "ranks": "false"}
    assert "r1.jsonl  40 bytes" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["r1.jsonl"]


def test_the_ending_says_the_format_and_json_describes_the_file(served, tmp_path):
    seen = served(httpx.Response(200, content=b"step\n"))
    result = CliRunner().invoke(export, ["r1", "--output", "t.csv", "--no-layers", "--ranks", "--json"])
    assert json.loads(result.stdout) == {"run_id": "r1", "format": "csv", "file": "t.csv", "bytes": 5}
    assert dict(seen[0].url.params) == {"format": "csv", "layers": "false", "ranks": "true"}
    assert (tmp_path / "t.csv").read_bytes() == b"step\n"


def test_export_to_standard_output(served, tmp_path):
    served(httpx.Response(200, content=LINES))
    result = CliRunner().invoke(export, ["r1", "--output", "-"])
    assert result.stdout_bytes == LINES
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_breaks_off_leaves_no_file(served, tmp_path):
    def broken():
        yield LINES[:10]
        raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")

    served(httpx.Response(200, content=broken()))
    (tmp_path / "r1.jsonl").write_text("older")
    result = CliRunner().invoke(export, ["r1"])
    assert isinstance(result.exception, ServerUnreachable)
    assert "run the export again" in str(result.exception)
    assert (tmp_path / "r1.jsonl").read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == ["r1.jsonl"]


def test_an_unwritable_place_and_an_unknown_ending(served):
    served(httpx.Response(200, content=LINES))
    result = CliRunner().invoke(export, ["r1", "--output", "none/r1.csv"])
    assert isinstance(result.exception, CollageError)
    assert "choose another --output" in str(result.exception)
    assert "say which with --format" in CliRunner().invoke(export, ["r1", "--output", "r1.xlsx"]).output


def test_import_prints_the_new_run(served, tmp_path):
    zeros = dict.fromkeys(("attempt", "rank", "world_size", "process_id", "layers", "reports"), 0)
    nothing = dict.fromkeys(("last_seq", "last_step", "last_report_at"))
    answers = {
        "reports": {"accepted": 1, "duplicates": 0},
        "attempts": {"run_id": "r", "attempt": 1, "launch_id": "import", "first_step": 0, "created_at": 1.0},
        "streams": {"run_id": "r", "stream_id": "r:import", "statistics": [], **zeros, **nothing},
    }

    def answer(request):
        return httpx.Response(200, json=answers.get(request.url.path.rpartition("/")[2], RUN))

    seen = served(answer)
    (tmp_path / "c.csv").write_text("step,loss\n1,4.0\n")
    result = CliRunner().invoke(import_run, ["c.csv", "--project", "p", "--name", "mine"])
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == ["r"]
    asked = [f"{request.method} {request.url.path.rpartition('/')[2]}" for request in seen]
    assert asked[:4] == ["POST runs", "POST attempts", "PATCH r", "POST streams"]
    assert seen[-1].method == "PATCH"
    assert json.loads(seen[-1].content)["state"] == "finished"


def test_import_says_what_it_cannot_read(served, tmp_path):
    served(httpx.Response(500))
    (tmp_path / "c.csv").write_text("a,b\n")
    assert isinstance(CliRunner().invoke(import_run, ["c.csv", "--project", "p"]).exception, ImportRefusal)
    (tmp_path / "c.txt").write_text("")
    assert "--format" in CliRunner().invoke(import_run, ["c.txt", "--project", "p"]).output
    assert "COLUMN=NAME" in CliRunner().invoke(import_run, ["c.csv", "--project", "p", "--rename", "x"]).output
    (tmp_path / "r.jsonl").write_text("")
    for option in (("--rename", "a=b"), ("--step-column", "epoch")):
        refused = CliRunner().invoke(import_run, ["r.jsonl", "--project", "p", *option])
        assert "are for columns of CSV files" in refused.output
