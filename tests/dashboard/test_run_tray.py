"""What stands above the table of runs: what its parts offer, and what they ask the server for."""

import pytest
from collage_dashboard.pages.runs_controls import (
    _do,
    _listed,
    _save_view,
    columns_menu,
    filter_button,
    filter_row,
    pinned_line,
    tray,
    undo,
)
from collage_dashboard.server_reader import Reader
from collage_dashboard.view import View
from collage_server.settings import Settings

from collage_monitor import wire
from collage_monitor.client import Client
from tests.dashboard.walk import by_id, components, text
from tests.server.conftest import running
from tests.server.migrated import put_migrated


@pytest.fixture
def asked():
    """What was asked, as "METHOD /path"."""
    return []


@pytest.fixture
def read(tmp_path, asked):
    """Makes clients of a real server, in this process, that has no runs yet."""
    put_migrated(tmp_path)
    with running(Settings(folder=tmp_path, no_auth=True)) as server:
        yield lambda: Client("http://127.0.0.1", transport=server.transport(asked))


def put_runs(client, tags, project="demo"):
    """Runs with these tags, by id."""
    for run_id, own in tags.items():
        create = wire.RunCreate(run_id=run_id, name=run_id, tags=own)
        client.post(f"/projects/{project}/runs", create, wire.Run)


def tags_now(client):
    """The tags of every run, by its id."""
    return {run.run_id: run.tags for run in client.run_table(limit=500).rows}


@pytest.mark.parametrize(
    ("action", "named", "left", "written"),
    [
        ("archive", [], {"a": ["x", "archived"], "b": ["archived"]}, ["PATCH a"]),
        ("unarchive", [], {"a": ["x"], "b": []}, ["PATCH b"]),
        ("tag", ["x", "y"], {"a": ["x", "y"], "b": ["archived", "x", "y"]}, ["PATCH a", "PATCH b"]),
        ("delete", [], {}, ["DELETE a", "DELETE b"]),
    ],
)
def test_an_action_writes_to_the_picked_runs_that_it_changes(read, asked, action, named, left, written):
    with read() as client:
        put_runs(client, {"a": ["x"], "b": ["archived"], "c": []})
        asked.clear()
        changed = _do(client, action, ["a", "b"], named)
        assert sorted(changed) == [entry.split()[1] for entry in written]
        back = [part.id["index"] for part in components(undo(action, changed)) if getattr(part, "id", None)]
        # b was archived before.
        ways = {"archive": "unarchive\na", "unarchive": "archive\nb", "delete": "restore\na\nb"}
        assert back == [ways[action]] if action in ways else not back
        found = [entry.replace("/api/v1/runs/", "") for entry in asked if not entry.startswith("GET ")]
        assert sorted(found) == written
        assert tags_now(client) == {**left, "c": []}
        if action == "delete":
            assert _do(client, "restore", ["a", "b"], []) == ["a", "b"]
            assert tags_now(client) == {"a": ["x"], "b": ["archived"], "c": []}


def test_more_runs_than_one_question_names_are_all_archived(read):
    with read() as client:
        put_runs(client, {f"r{place}": [] for place in range(105)})
        _do(client, "archive", [f"r{place}" for place in range(105)], [])
        assert list(tags_now(client).values()) == [["archived"]] * 105


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_tray_names_what_it_deletes_and_offers_a_baseline_to_one_run(count):
    picked = {f"r{place}": f"run {place}" for place in range(count)}
    parts = tray(picked)
    actions = [part.id["index"] for part in components(parts) if "picked-action" in str(getattr(part, "id", ""))]
    kept = [vars(part)["data-keeps"] for part in components(parts) if hasattr(part, "data-keeps")]
    assert kept + actions == ["pin", *["baseline"] * (count == 1), "tag", "archive", "unarchive"]
    message = next(part.message for part in components(parts) if hasattr(part, "message"))
    names = {1: "run 0", 2: "run 0, run 1", 5: "run 0, run 1, run 2 and 2 more"}
    assert message.startswith(f"Delete {names[count]}, with all curves, notes and incidents? ")
    assert message.endswith("You can undo it for 10 minutes.")


def test_an_empty_tray_only_says_how_to_compare():
    assert not [part for part in components(tray({})) if hasattr(part, "message")]


def test_pinned_runs_say_which_is_the_baseline():
    rows = [{"run_id": "a", "name": "one"}, {"run_id": "b", "name": "two"}]
    line = pinned_line(rows, View(pins=("a", "b"), baseline="b"))
    assert text(line).split() == ["Pinned:", "one", "×", "Baseline:", "two", "×"]
    assert [vars(part)["data-frees"] for part in components(line) if hasattr(part, "data-frees")] == ["a", "b"]
    assert pinned_line([], View()) is None


FILTERS = wire.RunFilters(project={"demo": 3, "other": 0}, strategy={"plus": 2}, group={}, tag={}, health={})


def offered(view, name):
    """What the select of a filter offers: value → label."""
    return {entry["value"]: entry["label"] for entry in by_id(filter_row(view, FILTERS), f"runs-{name}").data}


def test_filters_count_their_runs_and_keep_a_choice_that_no_run_has_any_more():
    assert offered(View(), "project") == {"demo": "demo (3)", "other": "other"}
    assert offered(View(), "strategy") == {"plus": "Collage plus (2)"}
    assert offered(View(group="gone"), "group") == {"gone": "gone"}
    assert list(offered(View(), "state")) == ["running", "finished", "failed", "stale"]


@pytest.mark.parametrize(
    ("view", "is_set"),
    [(View(), False), (View(group="g"), True), (View(archived="1"), True), (View(where=("lr > 1",)), True)],
)
def test_on_a_phone_the_button_of_the_filters_is_down_while_one_is_set(view, is_set):
    assert filter_button(view).checked is is_set


def test_the_order_of_a_phone_shows_only_an_order_that_it_offers():
    assert by_id(filter_row(View(sort="name"), FILTERS), "runs-sort").value == "name"
    assert by_id(filter_row(View(sort="optimizer.lr"), FILTERS), "runs-sort").value is None


def test_the_columns_that_are_shown_stand_in_their_menu():
    assert by_id(columns_menu(View(columns=("name", "optimizer.lr"))), "runs-columns").value[-1] == "optimizer.lr"


@pytest.mark.parametrize(
    ("projects", "name", "search", "words"),
    [
        (("demo", "other"), "mine", "", "Choose a project first"),
        (("demo",), "", "", "Name the view, then save it."),
        (("demo",), "mine", "?group=g", "mine"),
        (("demo", "other"), "mine", "?project=other", "mine"),
    ],
)
def test_a_view_is_saved_under_a_name_and_a_project(read, projects, name, search, words):
    with read() as client:
        for project in projects:
            put_runs(client, {f"of-{project}": []}, project)
        assert text(_save_view(Reader(read), name, search)).startswith(words)
        wanted = {"": [], "?group=g": ["demo"], "?project=other": ["other"]}[search]
        saved = [(view.project, view.search) for view in client.views()]
        assert saved == [(project, search.removeprefix("?")) for project in wanted]


def test_saved_views_lead_to_what_was_saved_and_can_be_deleted():
    view = wire.SavedView(project="demo", name="mine", search="group=g", made_by="me", made_at=0.0)
    parts = list(components(_listed([view])))
    assert [part.href for part in parts if hasattr(part, "href")] == ["/runs?group=g"]
    assert [part.id["index"] for part in parts if getattr(part, "id", None)] == ["demo\nmine"]
    assert _listed([]) == "No view is saved yet."
