"""The verbs about runs against a real server: list, show, compare, tag, note, delete, open, login."""

import json
import stat
import webbrowser
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from click.testing import CliRunner

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command import root
from collage_monitor.command import server as verbs
from collage_monitor.command.terminal import coloured
from collage_monitor.diagnosis import percent
from collage_monitor.local import find_token, read_login, server_address
from collage_monitor.metrics import is_metric
from tests.server.reads import evaluate_due

pytestmark = pytest.mark.slow


@pytest.fixture
def asked():
    """What verbs have asked, as "METHOD /path"."""
    return []


@pytest.fixture
def call(server, monkeypatch, asked):
    """Calls a verb; its requests are answered by the server of this test."""
    server.filled("01AB-one", "s1", name="plain bf16", config={"lr": 0.1, "seed": 1})
    server.filled("01AB-two", "s2", name="plus", config={"lr": 0.2, "seed": 1}, tags=["sweep"], project="q")
    server.filled("01CD-three", "s3", name="twice")
    server.run("01CE-four", name="twice")

    def client(url, token=None, **more):
        return Client(url, None, transport=server.transport(asked), **more)

    monkeypatch.setattr(verbs, "Client", client)
    monkeypatch.setattr("collage_monitor.command.login.Client", client)

    def invoke(*words, status=0, stdin=None):
        environment = {"COLLAGE_SERVER_URL": "http://127.0.0.1", "COLUMNS": "200"}
        result = CliRunner().invoke(root, list(words), input=stdin, env=environment)
        assert result.exit_code == status, result.output
        return result

    return invoke


def judged(server):
    """Of now: what is kept of a run may be older than its reports until the server's own thread comes."""
    evaluate_due(server.store)
    return server.get("/runs/01AB-one/overview", wire.Overview)


def rows_of(result):
    """The ids of the runs that a table shows."""
    found = [line.split()[-1] for line in result.stdout.splitlines() if line[:2] in {"✓ ", "? ", "! "}]
    return [run for run in found if run.startswith("01")]


def test_list_says_who_is_sick_where_and_since_when(call, server):
    for run in ("01AB-one", "01AB-two", "01CD-three"):
        server.get(f"/runs/{run}/overview")
    result = call("list")
    said, head, *rows = result.stdout.splitlines()
    assert said == "3 of 4 runs are sick."
    assert head.split() == ["name", "strategy", "verdict", "worst", "layer", "since", "lost", "EDQ", "step", "run"]
    assert [row[0] for row in rows[:4]] == ["!", "!", "!", "?"], "those with a problem come first"
    overview = server.get("/runs/01AB-one/overview", wire.Overview)
    row = next(row for row in rows if row.endswith("01AB-one"))
    told = ("plain bf16", overview.short, overview.worst[0].layer, f"{overview.numbers['edq_ratio']:.3f}")
    for word in (*told, percent(overview.numbers["lost_update_ratio"])):
        assert word in row, word
    assert rows[-1].startswith("`collage-monitor show 01")
    for seed in range(30):
        server.run(f"01EE-{seed:02}", name=f"split-master-bfloat16-learning-rate-3e-4-seed-{seed:02}")
    lines = call("list").stdout.splitlines()
    assert len(lines) <= 25, "many runs fit a screen"
    told = sum(line.startswith("? split-master-…e-3e-4-seed-") for line in lines)
    assert told in {16, 17}, "three others come first; the place of the fourth, unknown too, is open"
    assert "14 more; --limit shows more of them" in lines


def test_list_takes_filters_and_says_when_nothing_is_left(call, server):
    for filters, found in (
        (["--project", "q"], ["01AB-two"]),
        (["--tag", "sweep"], ["01AB-two"]),
        (["--strategy", "plain", "--project", "q"], ["01AB-two"]),
        (["--limit", "1"], ["01CE-four"]),
    ):
        assert rows_of(call("list", *filters)) == found, filters
    alike = ["01AB-one", "01AB-two", "01CD-three"]
    (health,) = {server.get(f"/runs/{run}/overview", wire.Overview).health for run in alike}
    assert " " in health
    for word in (health, health.replace(" ", "-")):
        assert sorted(rows_of(call("list", "--health", word))) == alike, "or as `check --fail-if` writes it"
    assert call("list", "--health", "average is off").stdout == "no run has health average is off\n"


def test_show_takes_an_id_its_beginning_or_a_name_and_begins_with_the_judgement(call, server):
    said = judged(server)
    shown, *others = (call("show", word).stdout for word in ("01AB-one", "01AB-o", "plain bf16"))
    assert others == [shown] * 2
    lines = shown.splitlines()
    assert lines[0] == f"plain bf16: {said.health}"
    assert lines[1].strip() == said.headline
    assert len(lines) <= 25
    assert any(line.split()[:4] == f"steps {said.first_step} to {said.last_step}".split() for line in lines)
    (edq,) = [line for line in lines if line.startswith("EDQ ")]
    assert edq.split()[1] == f"{said.numbers['edq_ratio']:.3f}"
    assert "loss 3.500 at step 50" in lines
    place = next(place for place, line in enumerate(lines) if line.startswith("worst layers"))
    assert [line.split()[0] for line in lines[place + 1 :]] == [one.layer for one in said.worst]
    everything = call("show", "01AB-one", "--all").stdout
    assert said.text in everything
    assert all(f"  {key} " in everything for key in said.numbers if is_metric(key))


def test_show_as_json_has_the_judgement_and_the_findings_by_key(call, server):
    said = judged(server)
    shown = json.loads(call("show", "plain bf16", "--json").stdout)
    assert (shown["health"], shown["headline"], shown["text"]) == (said.health, said.headline, said.text)
    assert (shown["first_step"], shown["last_step"]) == (said.first_step, said.last_step)
    assert [finding["key"] for finding in shown["findings"]]
    assert (shown["run_id"], shown["name"], shown["step"]) == ("01AB-one", "plain bf16", 50)
    assert shown["numbers"]["edq_ratio"] == pytest.approx(said.numbers["edq_ratio"])
    assert shown["model"]["edq_ratio"] is not None


def test_a_word_that_means_no_run_or_several_is_answered_with_what_comes_near(call):
    for word, said, near in (
        ("01AB", "may be one of 2 runs; name its id", 2),
        ("twice", "may be one of 2 runs; name its id", 2),
        ("plain bf61", "did you mean 'plain bf16'?", 0),
        ("nothing like it", "`collage-monitor list` names all", 0),
    ):
        told = call("show", word, status=1).stderr
        assert said in told
        assert "collage-monitor: " in told
        assert len([line for line in told.splitlines() if line.strip().startswith("01")]) == near


STEERING = "\x1b]0;a title\x07"
"""Names the terminal's window. click takes out what colours and moves where no terminal is, but not this."""


def test_a_name_that_would_steer_the_terminal_does_not_and_colours_can_be_left_out(call, server, monkeypatch):
    server.run("01ZZ", name=f"{STEERING}x\nrun")
    for words in (["list"], ["show", "01ZZ"], ["open", "01ZZ", "--print", "--dashboard-url", "http://d"]):
        assert "\x1b" not in call(*words).output, "nor is it coloured: this is no terminal"
    for run, value in (("01YA-a", 1), ("01YB-b", 2)):
        server.run(run, config={f"{STEERING}lr": value})
    assert "\x1b" not in call("compare", "01YA-a", "01YB-b").output
    assert coloured("healthy", "healthy").startswith("\x1b[32m")
    assert coloured("bad", "losing updates").startswith("\x1b[31m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("healthy", "healthy") == "healthy"


def test_compare_recommends_and_tells_verdicts_losses_and_the_settings_that_differ(call):
    result = call("compare", "plus", "01AB-one")
    said, head, first, second, _ = result.stdout.splitlines()
    assert said == "Their losses are equal. 0 of 2 runs are known to keep updates.", "none is judged"
    assert head.split()[-4:] == ["loss", "lost", "EDQ", "lr"]
    assert first.split()[-1] == "0.2"
    assert "3.500" in first.split()
    assert (first.split()[1], second.split()[1]) == ("plus", "plain")
    assert "seed" not in head
    rows = json.loads(call("compare", "plus", "01AB-one", "--json").stdout)["rows"]
    assert [row["run_id"] for row in rows] == ["01AB-two", "01AB-one"]
    assert "two runs or more" in call("compare", "plus", status=2).stderr


def test_tags_are_given_and_taken_away_and_a_note_stands_in_the_timeline(call, server):
    assert call("edit", "plus", "--tag", "good", "--tag", "sweep").stdout == "plus: sweep, good\n"
    assert call("edit", "plus", "--remove-tag", "sweep").stdout == "plus: good\n"
    assert server.get("/runs/01AB-two", wire.Run).tags == ["good"]
    assert "no such tag; it has good" in call("edit", "plus", "--remove-tag", "bad", status=2).stderr
    assert call("edit", "plus").stdout == "plus: good\n"
    call("edit", "plus", "--note", "raised the rate", "--step", "30")
    notes = [event for event in server.get("/runs/01AB-two/events", wire.EventPage).events if event.kind == "note"]
    assert [(event.text, event.step) for event in notes] == [("loopback: raised the rate", 30)]
    assert "the note is empty" in call("edit", "plus", "--note", "  ", status=2).stderr


def test_nothing_is_deleted_without_a_yes(call, server):
    refused = call("delete", "plus", stdin="n\n", status=1)
    assert "01AB-two  plus, project q" in refused.stderr
    assert server.get("/runs/01AB-two", wire.Run).name == "plus"
    assert call("delete", "plus", "01AB-o", stdin="y\n").stdout == "deleted 01AB-two\ndeleted 01AB-one\n"
    for run in ("01AB-one", "01AB-two"):
        server.get(f"/runs/{run}", status=410)
    assert json.loads(call("delete", "01CD", "--yes", "--json").stdout) == [{"run_id": "01CD-three"}]


def test_open_opens_the_dashboard_s_page(call, monkeypatch):
    opened = Mock(return_value=True)
    monkeypatch.setattr(webbrowser, "open", opened)
    there = ["--dashboard-url", "http://dash/"]
    assert call("open", *there).stdout == "http://dash\n"
    call("open", "plus", *there)
    call("open", "plus", "01AB-o", *there, "--print")
    assert [one.args[0] for one in opened.call_args_list] == ["http://dash", "http://dash/run/01AB-two"]
    page = json.loads(call("open", "plus", "01AB-o", *there, "--json").stdout)["page"]
    assert page == "http://dash/compare?run=01AB-two&run=01AB-one"
    assert "pass --dashboard-url" in call("open", status=1).stderr


def test_login_keeps_address_and_token_for_this_user_alone(call):
    result = call("login", "http://127.0.0.1/", "--dashboard-url", "http://dash", stdin="secret-token\n")
    assert "secret-token" not in result.output
    kept = read_login()
    assert kept is not None
    assert (kept.server_url, kept.token, kept.dashboard_url) == ("http://127.0.0.1", "secret-token", "http://dash")
    (path,) = [line.split(" is kept in ")[1].split(",")[0] for line in result.stderr.splitlines() if "kept" in line]
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert server_address() == "http://127.0.0.1"
    assert find_token("http://127.0.0.1") == "secret-token"
    assert find_token("http://elsewhere") is None
    assert call("open", "--print").stdout == "http://dash\n"
    kept_addresses = {"server_url": "http://127.0.0.1", "dashboard_url": "http://dash"}
    assert json.loads(call("login", "--json").stdout) == kept_addresses
    assert call("login", "--forget").stdout == "logged out\n"
    assert read_login() is None
    assert "not logged in" in call("login").stdout
    for address in ("server", "ftp://x", "http://user:pw@host", "http://"):
        assert "is no address of a server" in call("login", address, "--token", "t", status=2).stderr
        assert read_login() is None


def test_a_token_that_the_server_does_not_know_is_not_kept(monkeypatch):
    refused = httpx.Response(401, json={"error": {"code": "unauthorised", "message": "no"}})
    refusing = partial(Client, transport=httpx.MockTransport(lambda _: refused))
    monkeypatch.setattr("collage_monitor.command.login.Client", refusing)
    result = CliRunner().invoke(root, ["login", "http://server", "--token", "wrong"])
    assert result.exit_code == 1
    assert "does not know this token" in result.stderr
    assert read_login() is None


def test_the_run_that_is_meant_is_read_once(call, asked):
    """Each verb read it again to know more than its id, `show` twice."""
    for words in (("edit", "01AB-one", "--tag", "kept"), ("show", "01AB-one"), ("delete", "01AB-one", "--yes")):
        asked.clear()
        call(*words)
        assert asked.count("GET /api/v1/runs/01AB-one") == 1, words
    asked.clear()
    call("edit", "plus", "--tag", "kept")
    assert [one for one in asked if one.startswith("GET")] == ["GET /api/v1/runs/plus", "GET /api/v1/runs"]
