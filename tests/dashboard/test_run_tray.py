"""What stands above the table of runs: what its parts offer, and what they ask the server for."""

import pytest
from collage_dashboard.app import create_dashboard
from collage_dashboard.pages import runs_controls as controls
from collage_dashboard.pages.runs_controls import filter_row, tray
from collage_dashboard.server_reader import Reader
from collage_dashboard.view import View
from collage_server.settings import Settings

from collage_monitor import wire
from collage_monitor.client import Client
from tests.dashboard.asking import question
from tests.dashboard.walk import attributes, by_id, text
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


@pytest.fixture
def client(read):
    with read() as own:
        yield own


def put_runs(client, tags, project="demo"):
    """Runs with these tags, by id."""
    for run_id, own in tags.items():
        create = wire.RunCreate(run_id=run_id, name=run_id, tags=own)
        client.post(f"/projects/{project}/runs", create, wire.Run)


def tags_now(client):
    """The tags of every run, by its id."""
    return {run.run_id: run.tags for run in client.run_table(limit=500).rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "named", "left", "written"),
    [
        ("archive", [], {"a": ["x", "archived"], "b": ["archived"]}, ["PATCH a"]),
        ("unarchive", [], {"a": ["x"], "b": []}, ["PATCH b"]),
        ("tag", ["x", "y"], {"a": ["x", "y"], "b": ["archived", "x", "y"]}, ["PATCH a", "PATCH b"]),
        ("delete", [], {}, ["DELETE a", "DELETE b"]),
    ],
)
def test_an_action_writes_to_the_picked_runs_that_it_changes(client, asked, action, named, left, written):
    put_runs(client, {"a": ["x"], "b": ["archived"], "c": []})
    asked.clear()
    changed = controls._do(client, action, ["a", "b"], named)
    assert sorted(changed) == [entry.split()[1] for entry in written]
    back = [identifier["index"] for identifier in attributes(controls.undo(action, changed), "id")]
    # b was archived before.
    ways = {"archive": "unarchive\na", "unarchive": "archive\nb", "delete": "restore\na\nb"}
    assert back == [ways[action]] if action in ways else not back
    found = [entry.replace("/api/v1/runs/", "") for entry in asked if not entry.startswith("GET ")]
    assert sorted(found) == written
    assert tags_now(client) == {**left, "c": []}
    if action == "delete":
        assert controls._do(client, "restore", ["a", "b"], []) == ["a", "b"]
        assert tags_now(client) == {"a": ["x"], "b": ["archived"], "c": []}


@pytest.mark.slow
def test_runs_of_a_comparison_count_as_configured_alike_until_they_are_told_apart_again(client, read):
    for run_id, rate in (("a", 1e-3), ("b", 1e-4)):
        client.create_run("demo", wire.RunCreate(run_id=run_id, config={"lr": rate}))
    app = create_dashboard(read)
    [output] = [name for name in app.callback_map if name.startswith("..compare-treated.data")]
    for alike in (True, False):
        rows = wire.encode_message(client.run_table().rows, wire.JSON).decode()
        asked = question([], [("compare-treat", "n_clicks", 1)], [("compare-rows", "data", rows)])
        outputs = [
            dict(zip(("id", "property"), name.split("."), strict=True)) for name in output[2:-2].split("...")
        ]
        answer = app.server.test_client().post(
            "/_dash-update-component", json=asked | {"output": output, "outputs": outputs}
        )
        assert answer.status_code == 200
        assert [row.is_treated for row in client.run_table().rows] == [alike, alike]
        assert len({row.configuration for row in client.run_table().rows}) == (1 if alike else 2)


@pytest.mark.slow
def test_more_runs_than_one_question_names_are_all_archived(client):
    names = [f"r{place}" for place in range(105)]
    put_runs(client, {name: [] for name in names})
    controls._do(client, "archive", names, [])
    assert list(tags_now(client).values()) == [["archived"]] * 105


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_tray_names_what_it_deletes_and_offers_a_baseline_to_one_run(count):
    parts = tray({f"r{place}": f"run {place}" for place in range(count)})
    actions = [found["index"] for found in attributes(parts, "id") if "picked-action" in str(found)]
    kept = attributes(parts, "data-keeps")
    assert kept + actions == ["pin", *["baseline"] * (count == 1), "tag", "archive", "unarchive"]
    [message] = attributes(parts, "message")
    names = {1: "run 0", 2: "run 0, run 1", 5: "run 0, run 1, run 2 and 2 more"}
    assert message.startswith(f"Delete {names[count]}, with all curves, notes and incidents? ")
    assert message.endswith("You can undo it for 10 minutes.")
    assert attributes(tray({}), "message") == [], "an empty one deletes nothing"


def test_pinned_runs_say_which_is_the_baseline():
    rows = [{"run_id": "a", "name": "one"}, {"run_id": "b", "name": "two"}]
    line = controls.pinned_line(rows, View(pins=("a", "b"), baseline="b"))
    assert text(line).split() == ["Pinned:", "one", "×", "Baseline:", "two", "×"]
    assert attributes(line, "data-frees") == ["a", "b"]
    assert controls.pinned_line([], View()) is None


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
    assert controls.filter_button(view).checked is is_set


def test_the_order_of_a_phone_shows_only_what_it_offers_and_the_menu_of_columns_those_that_are_shown():
    for asked, told in (("name", "name"), ("optimizer.lr", None)):
        assert by_id(filter_row(View(sort=asked), FILTERS), "runs-sort").value == told
    assert (
        by_id(controls.columns_menu(View(columns=("name", "optimizer.lr"))), "runs-columns").value[-1]
        == "optimizer.lr"
    )


@pytest.mark.parametrize(
    ("projects", "name", "search", "words"),
    [
        (("demo", "other"), "mine", "", "Choose a project first"),
        (("demo",), "", "", "Name the view, then save it."),
        (("demo",), "mine", "?group=g", "mine"),
        (("demo", "other"), "mine", "?project=other", "mine"),
    ],
)
def test_a_view_is_saved_under_a_name_and_a_project(read, client, projects, name, search, words):
    for project in projects:
        put_runs(client, {f"of-{project}": []}, project)
    assert text(controls._save_view(Reader(read), name, search)).startswith(words)
    wanted = {"": [], "?group=g": ["demo"], "?project=other": ["other"]}[search]
    saved = [(view.project, view.search) for view in client.views()]
    assert saved == [(project, search.removeprefix("?")) for project in wanted]


def test_saved_views_lead_to_what_was_saved_and_can_be_deleted():
    view = wire.SavedView(project="demo", name="mine", search="group=g", made_by="me", made_at=0.0)
    listed = controls._listed([view])
    assert attributes(listed, "href") == ["/runs?group=g"]
    assert [identifier["index"] for identifier in attributes(listed, "id")] == ["demo\nmine"]
    assert controls._listed([]) == "No view is saved yet."
