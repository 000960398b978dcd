"""`collage-monitor sync`: what waits on disk is sent in order, once, and what is left is said."""

import json

import pytest
from click.testing import CliRunner
from collage_agent.command.sync import sync
from collage_agent.transport.report_log import ReportLog, spool_path
from collage_agent.transport.sender import send_folder

from collage_monitor.errors import NotAuthorised, NotFound, ServerUnreachable, Unavailable
from collage_monitor.wire import RunCreate, RunUpdate
from tests.agent_delivery.doubles import Scripted, log_steps, make_run, of_kind
from tests.agent_delivery.test_report_log import reports

pytestmark = pytest.mark.slow


def leave_behind(folder, runs):
    for number in range(runs):
        run = make_run(folder, mode="offline", run_id=f"run-{runs - number}")
        log_steps(run, 1, 5)
        run.finish()


def invoke(*arguments):
    return CliRunner().invoke(sync, [str(argument) for argument in arguments], env={})


def test_runs_are_sent_in_the_order_in_which_they_were_made(tmp_path, transport):
    leave_behind(tmp_path, 3)
    outcomes = send_folder(tmp_path, transport, 0.0)
    assert [entry.run_id for entry in outcomes.spools] == ["run-3", "run-2", "run-1"]
    assert [entry.sent for entry in outcomes.spools] == [5, 5, 5]
    created = dict.fromkeys(message.run_id for message in of_kind(transport, RunCreate))
    assert list(created) == ["run-3", "run-2", "run-1"]
    assert [message.state for message in of_kind(transport, RunUpdate)] == ["finished"] * 3
    assert list(tmp_path.glob("spool/*")) == []


def test_the_command_sends_to_a_server_and_says_what_it_did(tmp_path, server):
    leave_behind(tmp_path, 2)
    (tmp_path / "token").write_text("from-the-folder\n")
    result = invoke("--server-url", server.url, "--dir", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    outcomes = [(entry["run_id"], entry["sent"], entry["bytes_left"]) for entry in answer["spools"]]
    assert outcomes == [("run-2", 5, 0), ("run-1", 5, 0)]
    assert (answer["in_use"], answer["error"]) == (0, None)
    assert sorted(server.steps()) == sorted([*range(1, 6)] * 2)
    assert server.requests[0][2]["authorization"] == "Bearer from-the-folder"
    again = invoke("--server-url", server.url, "--dir", tmp_path)
    assert "nothing waits" in again.output


def test_without_a_server_everything_stays_and_the_command_fails(tmp_path, server):
    leave_behind(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.glob("spool/*/*")}
    url = server.url
    server.close()
    result = invoke("--server-url", url, "--dir", tmp_path, "--wait", 0)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"collage-monitor: not everything could be sent: {url}")
    assert "`collage-monitor up` starts a server here; --server-url names another" in result.stderr
    assert "bytes left" in result.output
    assert {path: path.read_bytes() for path in tmp_path.glob("spool/*/*")} == before


def test_a_spool_of_a_living_process_is_left_to_it(tmp_path, server):
    log = ReportLog(spool_path(tmp_path, "run", "stream"))
    log.append(reports(0))
    log.keep()
    result = invoke("--server-url", server.url, "--dir", tmp_path)
    assert result.exit_code == 0
    assert "1 files belong to runs that are alive" in result.output
    assert server.requests == []
    log.close()


@pytest.mark.parametrize(
    "error", [ServerUnreachable("away"), Unavailable("busy", status=503, retry_after_seconds=7.0)]
)
def test_a_server_that_is_away_for_a_moment_is_waited_for(tmp_path, error):
    leave_behind(tmp_path, 1)
    now = [0.0]
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    outcomes = send_folder(tmp_path, Scripted(error), 30.0, sleep=sleep, clock=lambda: now[0])
    assert [entry.sent for entry in outcomes.spools] == [5]
    assert outcomes.error is None
    assert sum(slept) >= (getattr(error, "retry_after_seconds", None) or 0.1)


def test_a_server_that_loses_the_stream_meanwhile_is_told_of_it_again(tmp_path):
    leave_behind(tmp_path, 1)
    transport = Scripted(None, None, None, NotFound("no such stream", status=404))
    outcomes = send_folder(tmp_path, transport, 0.0)
    assert [(entry.sent, entry.dropped) for entry in outcomes.spools] == [(5, {})]


def test_a_wrong_token_is_said_at_once(tmp_path):
    leave_behind(tmp_path, 2)
    slept: list[float] = []
    outcomes = send_folder(tmp_path, Scripted(NotAuthorised("no", status=401)), 30.0, sleep=slept.append)
    assert (outcomes.error, slept) == ("no", [])
    assert [entry.bytes_left > 0 for entry in outcomes.spools] == [True]
    assert len(list(tmp_path.glob("spool/*/*"))) == 2
