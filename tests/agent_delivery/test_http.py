"""Delivery over real HTTP to a server that answers, refuses, stalls, lies or is not there."""

import pytest

from collage_monitor.wire import ReportBatch, ReportGap, decode_batch
from tests.agent_delivery.doubles import ended_run, log_steps, make_run, measurement
from tests.ports import free_port
from tests.waiting import until


def spools(folder):
    return sorted(folder.glob("spool/*/*.spool"))


def begun(folder, server):
    """A run whose first step has arrived."""
    run = make_run(folder, server_url=server.url)
    run.started(1)
    log_steps(run, 1, 1)
    until(lambda: run.reports_sent == 1)
    return run


@pytest.fixture
def batches(server, monkeypatch):
    """The batches that arrive; the server rejects the report 0, the first of all."""
    arrived: list[ReportBatch] = []

    def reject_first(path, body):
        answer = plain(path, body)
        if not path.endswith("/reports"):
            return answer
        arrived.append(decode_batch(body))
        if arrived[-1].reports[0].seq:
            return answer
        entry = {"index": 0, "seq": 0, "code": "past_horizon", "message": "step 1 came too late"}
        return answer | {"accepted": answer["accepted"] - 1, "rejected": [entry]}

    plain = server.store
    monkeypatch.setattr(server, "store", reject_first)
    return arrived


def test_messages_take_their_routes_with_the_token_and_leave_no_lines_in_the_log(tmp_path, server, caplog):
    caplog.set_level("INFO", logger="httpx")
    run = make_run(tmp_path, server_url=server.url, token="secret-token", project="my project")
    run.measured(measurement(1))
    run.finish()
    asked = [f"{method} {path.removeprefix('/api/v1/')}" for method, path, _, _ in server.requests]
    stream = asked[4].split("/")[1]
    assert asked == [
        "POST projects/my%20project/runs",
        f"POST runs/{run.run_id}/attempts",
        *[f"POST runs/{run.run_id}/streams"] * 2,
        f"POST streams/{stream}/reports",
        f"PATCH runs/{run.run_id}",
    ]
    headers = [{name.lower(): value for name, value in headers.items()} for _, _, headers, _ in server.requests]
    assert {entry["authorization"] for entry in headers} == {"Bearer secret-token"}
    assert {entry["content-type"] for entry in headers} == {"application/msgpack"}
    assert run.reports_sent == 1
    assert spools(tmp_path) == []
    assert [record.getMessage() for record in caplog.records if record.name == "httpx"] == []


def test_the_local_token_goes_to_a_local_server_only(tmp_path, server):
    (tmp_path / "token").write_text("from-the-folder\n")
    make_run(tmp_path, server_url=server.url).finish()
    assert server.requests[0][2]["authorization"] == "Bearer from-the-folder"
    remote = make_run(tmp_path, server_url="http://collage.invalid:7420", mode="disabled")
    assert remote.settings.token is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble", [500, 503, (429, (("Retry-After", "0.02"),)), "garbage", "hang", "cut", 302, 408]
)
def test_passing_trouble_loses_and_doubles_nothing(tmp_path, server, trouble):
    run = begun(tmp_path, server)
    server.script = [trouble, None, trouble]
    log_steps(run, 2, 4)
    until(lambda: len(server.steps()) == 4)
    log_steps(run, 5, 6)
    run.finish()
    assert sorted(server.steps()) == [1, 2, 3, 4, 5, 6]
    assert (run.reports_sent, run.reports_dropped, run.reports_spooled) == (6, {}, 0)
    assert spools(tmp_path) == []


def test_retry_after_is_respected(tmp_path, server):
    server.script = [(503, (("Retry-After", "1.2"),))]
    run = make_run(tmp_path, server_url=server.url)
    until(lambda: len(server.requests) > 1)
    run.finish()
    # At least so long, which holds on any machine: both moments are the server's.
    assert server.moments[1] - server.moments[0] >= 1.2


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_a_refused_report_is_dropped_and_counted_and_told_as_a_gap(tmp_path, server, status, caplog):
    run = begun(tmp_path, server)
    server.script = [status]
    log_steps(run, 2, 2)
    until(lambda: run.reports_dropped == {f"refused_{status}": 1})
    log_steps(run, 3, 3)
    run.finish()
    assert sorted(set(server.steps())) == [1, 3]
    assert caplog.text.count("as the script says") == 1
    batches = [decode_batch(body) for _, path, _, body in server.requests if path.endswith("/reports")]
    gap = ReportGap(first_seq=1, last_seq=1, reason=f"refused_{status}")
    assert [told for batch in batches for told in batch.gaps] == [gap]


def test_a_server_that_lost_the_stream_is_told_again_and_the_log_tells_once(tmp_path, server, caplog):
    run = begun(tmp_path, server)
    asked = len(server.requests)
    for step in (2, 3):
        server.script = [404]
        log_steps(run, step, step)
        until(lambda step=step: run.reports_sent == step)
    run.finish()
    again = [path.rsplit("/", 1)[1] for path in server.paths[asked : asked + 5]]
    assert again == ["reports", "runs", "attempts", "streams", "reports"]
    assert caplog.text.count("what it had acknowledged before may be missing there") == 1


def test_a_refused_run_stops_sending(tmp_path, server, caplog):
    server.script = [409]
    run = ended_run(tmp_path, 2, server_url=server.url, run_id="taken", resume="never")
    assert len(server.requests) == 1
    assert run.reports_dropped == {"run_refused": 2}
    assert "refuses run taken" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("status", "token"), [(401, None), (401, "wrong-token"), (403, "wrong-token")])
def test_without_a_valid_token_reports_wait_on_disk(tmp_path, server, status, token, caplog, capsys):
    """The token shows nowhere."""
    server.always = status
    run = ended_run(tmp_path, 3, server_url=server.url, token=token)
    assert (run.reports_sent, run.reports_spooled, run.reports_dropped) == (0, 3, {})
    printed, said = capsys.readouterr()
    assert "set COLLAGE_TOKEN" in said
    texts = [repr(run), repr(run.settings), caplog.text, printed, said]
    assert not any(secret in text for secret in ("wrong-token", "Bearer") for text in texts)
    assert not any(b"wrong-token" in path.read_bytes() for path in spools(tmp_path))
    server.always = None
    make_run(tmp_path, server_url=server.url, token="right").finish()
    assert sorted(server.steps()) == [1, 2, 3]


def test_rejected_reports_are_counted_and_their_neighbours_kept(tmp_path, server, batches, caplog):
    run = ended_run(tmp_path, 3, server_url=server.url)
    assert run.reports_dropped == {"rejected": 1}
    assert run.reports_sent + 1 == len(server.steps())
    assert "step 1 came too late" in caplog.text


def test_a_rejected_report_is_told_as_a_gap_with_the_next_batch(tmp_path, server, batches):
    run = make_run(tmp_path, server_url=server.url)
    run.started(1)
    log_steps(run, 1, 1)
    until(lambda: run.reports_dropped == {"rejected": 1})
    log_steps(run, 2, 2)
    run.finish()
    assert batches[-1].gaps == [ReportGap(first_seq=0, last_seq=0, reason="rejected")]


def test_an_absent_server_costs_nothing_and_the_next_run_delivers_once(tmp_path, server, capsys):
    run = make_run(tmp_path, server_url=f"http://127.0.0.1:{free_port()}", name="first")
    run.measured(measurement(1))
    log_steps(run, 2, 20)
    run.finish()
    printed = capsys.readouterr()
    assert "collage-monitor up" in printed.err
    assert f"run first: 20 reports wait in {tmp_path}/spool/{run.run_id}" in printed.out
    assert (run.reports_sent, run.reports_spooled, run.reports_dropped) == (0, 20, {})
    later = make_run(tmp_path, server_url=server.url)
    later.finish()
    assert sorted(server.steps()) == list(range(1, 21))
    paths = [path for path in server.paths if run.run_id in path or path.endswith(("/runs", "/reports"))]
    _, *first = [path.rsplit("/", 1)[1] for path in paths]
    assert first == ["runs", "attempts", "streams", "streams", *["reports"] * (len(first) - 5), run.run_id]
    assert spools(tmp_path) == []
    assert later.reports_sent == 0


def test_finish_keeps_its_deadline_when_the_server_hangs(tmp_path, server):
    server.always = "hang"
    run = ended_run(tmp_path, 5, server_url=server.url)
    assert (run.reports_sent, run.reports_spooled, run.reports_dropped) == (0, 5, {})


def test_nothing_is_sent_to_a_stranger_at_the_default_address(tmp_path, server, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nobody is announced"))
    monkeypatch.setattr("collage_monitor.local.DEFAULT_SERVER_URL", server.url)
    monkeypatch.setattr(server, "always", 404)
    original = server.http.RequestHandlerClass.do_GET
    monkeypatch.setattr(server.http.RequestHandlerClass, "do_GET", lambda self: self.reply(200, b"hello"))
    run = ended_run(tmp_path, 2)
    assert server.requests == []
    assert run.reports_spooled == 2
    assert "no server answers" in capsys.readouterr().err
    monkeypatch.setattr(server.http.RequestHandlerClass, "do_GET", original)
    monkeypatch.setattr(server, "always", None)
    make_run(tmp_path).finish()
    assert sorted(server.steps()) == [1, 2]


def test_offline_mode_keeps_everything_for_the_next_run(tmp_path, server, capsys):
    run = ended_run(tmp_path, 4, server_url=server.url, mode="offline")
    assert server.requests == []
    assert run.reports_spooled == 4
    assert "offline: reports are kept in" in capsys.readouterr().err
    make_run(tmp_path, server_url=server.url).finish()
    assert sorted(server.steps()) == [1, 2, 3, 4]


def test_a_connection_closed_while_idle_is_opened_again_even_at_the_end(tmp_path, server):
    run = begun(tmp_path, server)
    server.script = ["cut"]
    run.finish()
    assert [method for method, _, _, _ in server.requests][-2:] == ["PATCH", "PATCH"]
    assert spools(tmp_path) == []


def test_a_run_that_ends_just_after_its_server_dropped_it_tries_once_more(tmp_path, server):
    server.script = ["cut"]
    run = make_run(tmp_path, server_url=server.url)
    log_steps(run, 1, 1)
    until(lambda: server.requests)
    run.finish()
    assert (run.reports_sent, run.reports_spooled, spools(tmp_path)) == (1, 0, [])
