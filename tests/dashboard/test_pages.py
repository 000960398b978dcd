"""Pages laid out from a server's answers: what stands on them, what they say, and what they must not say."""

import re
import threading
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.app import render
from collage_dashboard.components import IDLE_MILLISECONDS, LIVE_MILLISECONDS, milliseconds_after
from collage_dashboard.incident_evidence import read_incident_evidence
from collage_dashboard.pages.comparison import _revision as comparison_revision
from collage_dashboard.pages.comparison_content import COLUMNS, comparison_table
from collage_dashboard.pages.incident_content import body
from collage_dashboard.pages.run import _at as run_at
from collage_dashboard.pages.run_about import about
from collage_dashboard.pages.run_content import SERIES, TABS, draw, first_curves, head, panel, summary, tabs_of
from collage_dashboard.pages.run_layers import keys_of_layers, layer_rows, map_style
from collage_dashboard.pages.runs_content import compare_link, headline_of, rows
from collage_dashboard.view import View, read_address

from collage_monitor import wire
from collage_monitor.diagnosis import percent
from tests.dashboard.generated import GeneratedRun
from tests.dashboard.walk import by_id, components, text

DEMO = ("run-plain", "run-light", "run-plus", "run-master-weights", "run-fp32-reference")


@pytest.fixture
def compared(server):
    """The demo's runs side by side."""
    return server.client().compare(DEMO, "edq_ratio")


@pytest.fixture
def overviews(server):
    """What is said of each of them, by id."""
    return {run_id: server.client().overview(run_id) for run_id in DEMO}


@pytest.mark.slow
def test_a_strategy_that_is_not_what_was_declared_is_marked(server):
    class Misled(GeneratedRun):
        def watch(self):
            return msgspec.structs.replace(super().watch(), strategy="master-weights", observed_strategy="plain")

    server.runs["run-x"] = Misled("x", "plain", run_id="run-x")
    row = next(row for row in rows(server.client().run_table().rows) if row["run_id"] == "run-x")
    assert row["disputed"] is True
    assert row["strategy"] == "fp32 master weights · bfloat16 (observed: Plain)"
    assert "observed: Plain" in text(head(server.client().run("run-x")))


def test_picked_runs_lead_to_their_comparison():
    tray = compare_link({"a": "one", "b": "two"})
    link = next(part for part in components(tray) if getattr(part, "href", None))
    assert link.href == "/compare?run=a&run=b"
    assert text(link) == "Compare 2 runs"
    assert link.title == "one, two"
    assert compare_link({}).disabled is True


def test_more_runs_than_a_comparison_shows_are_counted_on_the_button_the_page_and_its_report(server, reader):
    for place in range(70):
        run = GeneratedRun(f"run {place}", "plus", run_id=f"r{place}", steps=20)
        server.runs[run.run_id] = run
    tray = compare_link({f"r{place}": f"run {place}" for place in range(70)})
    link = next(part for part in components(tray) if getattr(part, "href", None))
    assert text(link) == "Compare 60 of 70 runs"
    page = render(read_address("/compare", urlsplit(link.href).query), reader)
    said = by_id(page, "compare-advice")
    assert "Among 60 of 70 runs: " in text(said)
    assert "10 runs are left out and may change the answer: filter the table of runs" in text(said)
    way = next(part.href for part in components(said) if getattr(part, "href", "").startswith("/report"))
    report = create_dashboard(server.client).server.test_client().get(way).get_data(as_text=True)
    assert "Among 60 of 70 runs: " in report


@pytest.mark.slow
def test_the_table_has_every_column_for_every_run(compared, overviews):
    whole = text(comparison_table(compared.runs, overviews))
    for column in COLUMNS:
        assert column.title in whole
    assert "Collage plus · bfloat16" in whole
    assert " 0 % 12 9,000" in whole


@pytest.mark.slow
def test_stochastic_runs_come_with_a_note_on_their_lost_share(server, reader):
    runs = server.client().compare(["run-live", "run-plain"], "edq_ratio").runs
    assert "the share lost in one step misjudges it" in text(comparison_table(runs, {}))
    page = render(read_address("/compare", "?run=run-live&run=run-plain"), reader)
    assert "the share lost in one step misjudges it" in text(page)
    assert "misjudges" not in text(render(read_address("/compare", "?run=run-plain"), reader))


def test_the_controls_of_a_comparison_stand_as_the_address_says(reader):
    search = "?run=run-plus&run=run-plain&metric=param_norm&axis=tokens&smoothing=0.5"
    page = render(read_address("/compare", search), reader)
    assert by_id(page, "compare-metric").value == "param_norm"
    assert by_id(page, "compare-axis").value == "tokens"
    assert by_id(page, "compare-smoothing").value == 0.5


def test_a_comparison_opens_with_its_numbers_and_sentences_from_one_question(server, reader):
    shown = text(render(read_address("/compare", "?run=run-plain&run=run-light"), reader))
    assert len(server.asked) == 1
    assert "exp_avg_sq is stuck" in shown
    assert "0.913" in shown


@pytest.mark.parametrize(
    ("pathname", "search", "marker", "milliseconds"),
    [
        ("/compare", "?run=run-plain", "compare-pace", IDLE_MILLISECONDS),
        ("/compare", "?run=run-plain&run=run-live", "compare-pace", LIVE_MILLISECONDS),
        ("/run/run-plain", "", "run-pace", IDLE_MILLISECONDS),
        ("/run/run-live", "", "run-pace", LIVE_MILLISECONDS),
    ],
)
def test_a_page_whose_runs_have_ended_rests_from_its_opening_on(reader, pathname, search, marker, milliseconds):
    page = render(read_address(pathname, search), reader)
    assert text(by_id(page, marker)) == str(milliseconds)


def test_a_run_page_says_each_fact_once_before_its_details(server, reader):
    run, overview = server.client().run("run-plain"), server.client().overview("run-plain")
    shown = summary(run, overview)
    numbers = [part for part in components(shown) if getattr(part, "className", None) == "number"]
    titles = ["EDQ", "Updates lost", "State decrement, exp_avg_sq", "Validation loss"]
    assert [text(part.children[0]) for part in numbers] == titles
    assert f"Loses {percent(overview.numbers['lost_update_ratio'])} of its updates" in text(shown)
    assert text(shown).count("over steps 10 to 200") == 1
    page = render(View(page="run", runs=("run-plain",)), reader)
    assert [part.value for part in by_id(page, "run-tab").children[0].children] == list(TABS)


def test_a_run_that_only_logs_shows_its_logs_and_one_line(server):
    """It said three times that no step was measured, over an empty heatmap, table and histogram."""
    run = msgspec.structs.replace(server.client().run("run-plain"), watch=None, latest={})
    view, told = View(page="run", runs=("run-plain",)), wire.Overview(run_id="run-plain")
    shown = [summary(run, told), panel(view, run), *first_curves(view, run)]
    charts = [part.id for part in components(shown) if isinstance(getattr(part, "id", None), dict)]
    assert {chart["metric"] for chart in charts if chart["type"] == "run-figure"} == set(run.scalars)
    assert text(shown).count("Logs only: no optimizer is watched.") == 1
    assert not re.search("measured|heatmap", text(shown))
    assert list(tabs_of(run)) == ["layers", "about"]
    assert map_style(view, run)


def test_a_single_step_has_no_interval(server):
    run, overview = server.client().run("run-plain"), server.client().overview("run-plain")
    bounds = {"edq_ratio_low": 0.9, "edq_ratio_high": 0.92}
    known = msgspec.structs.replace(overview, numbers={**overview.numbers, **bounds}, now={})
    assert "0.900 … 0.920" in text(summary(run, known))
    assert "…" not in text(summary(run, msgspec.structs.replace(known, measured_steps=1)))


@pytest.mark.slow
@pytest.mark.parametrize("tab", TABS)
def test_every_tab_has_content_and_every_figure_of_it_draws(server, reader, tab):
    view = View(page="run", runs=("run-plain",), tab=tab)
    run = server.client().run("run-plain")
    content = [panel(view, run), *first_curves(view, run)]
    ids = [part.id for part in components(content) if isinstance(getattr(part, "id", None), dict)]
    wanted = [entry for entry in ids if entry["type"] == "run-figure"]
    assert wanted or tab in {"about", "table"}
    for entry in wanted:
        drawn = draw(entry["kind"], entry["metric"], view, reader)
        assert drawn.data, entry


def test_a_curve_of_the_first_screen_says_why_it_is_missing(server, reader):
    class Silent(GeneratedRun):
        def scalars(self, step):
            return {name: value for name, value in super().scalars(step).items() if name != "loss"}

    server.runs["run-silent"] = Silent("silent", "plain", run_id="run-silent")
    view = View(page="run", runs=("run-silent",))
    assert "nothing logged yet" in draw("first", "loss", view, reader).layout.annotations[0].text
    assert draw("first", "edq_ratio", view, reader).data


@pytest.mark.parametrize(
    ("word", "found"),
    [("TOKENS per", ["tokens_per_second"]), ("oracle_d", ["oracle_displacement_ratio", "oracle_drift_ratio"])],
)
def test_a_search_finds_curves_by_key_and_by_title_among_all_that_a_run_has(server, word, found):
    run = server.client().run("run-plain")
    shown = panel(View(page="run", runs=("run-plain",), tab="curves", query=word), run)
    ids = [part.id for part in components(shown) if isinstance(getattr(part, "id", None), dict)]
    assert sorted(entry["metric"] for entry in ids if entry["type"] == "run-figure") == found
    nothing = panel(View(page="run", runs=("run-plain",), tab="curves", query="zzz"), run)
    assert text(nothing) == "Nothing that this run measures or logs has 'zzz' in its name."


def test_what_second_writers_log_stands_below_the_trainings_curves(server):
    run = msgspec.structs.replace(server.client().run("run-plain"), beside=["evaluator/accuracy"])
    content = panel(View(page="run", runs=("run-plain",), tab="curves"), run)
    ids = [part.id for part in components(content) if isinstance(getattr(part, "id", None), dict)]
    shown = [entry["metric"] for entry in ids if entry["type"] == "run-figure"]
    assert shown == [*SERIES["curves"], "evaluator/accuracy"]


def notes(count):
    """What happened to a run: a note a second."""
    return [
        wire.Event(event=i, time=float(i), kind="note", text=f"u: note {i}", step=i) for i in range(1, count + 1)
    ]


def test_of_many_events_the_newest_are_marked(server, reader):
    server.events = notes(1500)
    content = text(render(View(page="run", runs=("run-plain",)), reader))
    assert "note by u: note 1500 at step 1,500" in content
    assert "note by u: note 1000 " not in content
    asked = [url for url in server.asked if "/events?" in url]
    assert len(asked) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alert_at", "shown", "left_out"),
    [
        (1800, (1701, 1900), ["1700 older events are left out", "100 later events are left out"]),
        (2000, (1801, 2000), ["1800 older events are left out"]),
        (20, (1, 120), ["1880 later events are left out"]),
    ],
)
def test_an_incident_shows_what_happened_around_its_alert(server, alert_at, shown, left_out):
    server.events = notes(2000)
    incident = wire.Incident(
        incident_id="1",
        alert="CollageEdqLow",
        severity="warning",
        source="server",
        state="firing",
        text="",
        started_at=float(alert_at),
        run_id="run-plain",
        labels={},
        step=100,
    )
    content = text(body(read_incident_evidence(server.client(), incident)))
    first, last = shown
    for number in (first, last):
        assert f"u: note {number} " in content + " "
    for number in (first - 1, last + 1):
        assert f"u: note {number} " not in content + " "
    for words in ("older", "later"):
        told = [line for line in left_out if words in line]
        assert (f"{words} events are left out" in content) == bool(told)
        assert all(line in content for line in told)
    assert len([url for url in server.asked if "/events?" in url]) == 2


def test_the_heatmap_sorts_worst_first_as_the_table_of_what_loses_most_does(server, reader):
    """EDQ alone puts a layer of next to no updates first, and the table one of many."""
    depth = [layer.name for layer in server.client().layers("run-plain").layers]
    server.worst = [
        wire.LayerLoss(layer=name, share=share, edq_ratio=0.9, lost_update_ratio=0.3)
        for name, share in ((depth[3], 0.7), (depth[1], 0.2))
    ]
    view = View(page="run", runs=("run-plain",), order="worst")
    for metric in ("edq_ratio", "lost_update_ratio"):
        shown = list(draw("heatmap", metric, view, reader).data[0].y)
        assert shown[:2] == [depth[3], depth[1]]
        assert sorted(shown) == sorted(depth)
    assert list(draw("heatmap", "param_norm", view, reader).data[0].y)[:2] != [depth[3], depth[1]]


def test_a_layer_and_a_step_narrow_curves_and_histogram(server, reader):
    view = View(page="run", runs=("run-plain",), layer="head.weight", step=100)
    assert draw("series", "edq_ratio", view, reader).data[-1].name == "head.weight"
    draw("histogram", "predicted_plain_lost_ratio", view, reader)
    asked = parse_qs(urlsplit(server.asked[-1]).query)
    assert asked["layer"] == ["head.weight"]
    assert asked["step"] == ["100"]


def test_a_logged_scalar_is_never_asked_for_a_layer(server, reader):
    draw("series", "loss", View(page="run", runs=("run-plain",), layer="head.weight"), reader)
    assert not any("layer" in asked for asked in server.asked if "series" in asked)


def test_a_run_before_its_first_step_is_no_error(server, reader):
    server.runs["run-new"] = GeneratedRun("new", "plain", run_id="run-new", steps=5, every=10, state="running")
    run = server.client().run("run-new")
    assert run.latest == {}
    for tab in TABS:
        panel(View(page="run", runs=("run-new",), tab=tab), run)
    [row] = server.client().run_table(run_ids=["run-new"]).rows
    assert rows([row])[0]["edq_ratio"] is None


def test_about_tells_declared_from_observed_and_names_the_source_of_u(server):
    whole = text(about(server.client().run("run-plain")))
    assert "Strategy declared Plain" in whole
    assert "Strategy observed Plain" in whole
    assert "the optimizer's own rule in fp64" in whole
    assert "config: learning_rate 0.0002" in whole


def test_about_counts_the_layers_that_round_at_random_where_layers_differ(server):
    run = server.client().run("run-plain")
    seen = wire.Fingerprint(layer_rounds_at_random={"0.weight": True, "2.weight": False, "2.bias": False})
    mixed = msgspec.structs.replace(run, watch=msgspec.structs.replace(run.watch, fingerprint=seen))
    assert "Stochastic rounding seen in 1 of 3 layers" in text(about(mixed))


def test_a_slow_server_is_asked_less_often():
    assert milliseconds_after(0.1) == LIVE_MILLISECONDS
    assert milliseconds_after(5.0) == 20_000


def test_the_line_above_the_table_answers(server):
    """It said "6 runs, none of them live." of three that have a problem."""
    said = headline_of(server.client().run_table())
    assert " ".join(text(said).split()) == (
        "2 of 6 runs are sick. Worst: plain (loses 33.2 % of its updates). 1 live ."
    )
    assert [part.href for part in said if not isinstance(part, str)] == ["/run/run-plain", "/runs?state=running"]
    assert headline_of(server.client().run_table(q="plus")) == ["The run is healthy."]
    nothing = wire.RunTable(rows=[], total=2, live={}, healths={"unknown": 2})
    assert headline_of(nothing) == ["No problem is known of 2 runs, 0 of them healthy."]


@pytest.mark.parametrize(
    "address",
    ["/?column=optimizer.lr&where=lr+>+1", "/run/run-plain", "/compare?run=run-plain&run=run-plus", "/incidents"],
)
def test_no_two_parts_of_a_page_have_one_id(reader, address):
    pathname, _, search = address.partition("?")
    shown = components(render(read_address(pathname, search), reader))
    ids = [str(part.id) for part in shown if getattr(part, "id", None) is not None]
    assert len(ids) > 3, "the page is there"
    assert sorted(ids) == sorted(set(ids))


def test_where_all_runs_are_archived_the_table_says_so_and_how_to_show_them(server, reader):
    """It said "No runs yet", and how to train some."""
    server.archived = set(server.runs)
    empty = by_id(render(View(), reader), "runs-empty")
    assert empty.style == {}
    assert "All 6 runs are archived" in text(empty)
    assert [part.href for part in components(empty) if getattr(part, "href", None)] == ["/runs?archived=1"]
    assert by_id(render(View(archived="1"), reader), "runs-empty").style == {"display": "none"}
    server.runs.clear()
    server.archived.clear()
    assert "No runs yet" in text(by_id(render(View(), reader), "runs-empty"))


def test_the_layers_tab_asks_all_its_questions_at_the_same_time(server, reader):
    """It asked five, one after the other."""
    together = threading.Barrier(5)
    server.before_heatmap = lambda: together.wait(timeout=10)
    run = server.client().run("run-plain")
    found = layer_rows(reader, run.run_id, keys_of_layers(run), None)
    assert len(found) == len(server.client().layers("run-plain").layers)
    assert together.n_waiting == 0


def test_an_open_page_is_refreshed_when_only_a_second_writer_has_sent_something(server):
    [row] = server.client().run_table(run_ids=["run-plain"]).rows
    later = msgspec.structs.replace(row, reports=row.reports + 1)
    for revision in (run_at, lambda row: comparison_revision(View(page="compare"), [row])):
        assert revision(row) == revision(msgspec.structs.replace(row))
        assert revision(row) != revision(later)
