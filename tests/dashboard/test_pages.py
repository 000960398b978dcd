"""Pages laid out from a server's answers: what stands on them, what they say, and what they must not say."""

import re
import threading
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from collage_dashboard.components import IDLE_MILLISECONDS, LIVE_MILLISECONDS, milliseconds_after
from collage_dashboard.pages.comparison import _revision as comparison_revision
from collage_dashboard.pages.comparison_content import COLUMNS, comparison_table
from collage_dashboard.pages.run import _at as run_at
from collage_dashboard.pages.run_about import about
from collage_dashboard.pages.run_content import SERIES, TABS, draw, first_curves, head, panel, summary, tabs_of
from collage_dashboard.pages.run_layers import keys_of_layers, layer_rows, map_style
from collage_dashboard.pages.runs_content import compare_link, headline_of, rows
from collage_dashboard.view import View, read_address

from collage_monitor import wire
from collage_monitor.diagnosis import percent
from tests.dashboard.asking import answered, question
from tests.dashboard.generated import DEMO, GeneratedRun, raised_run
from tests.dashboard.walk import attributes, by_id, components, figures, text

PLAIN = View(page="run", runs=("run-plain",))


@pytest.fixture
def plain(server):
    """The run that loses its updates, as the server tells it."""
    return server.client().run("run-plain")


@pytest.mark.slow
def test_a_strategy_that_is_not_what_was_declared_is_marked(server):
    class Misled(GeneratedRun):
        def watch(self):
            return msgspec.structs.replace(super().watch(), strategy="master-weights", observed_strategy="plain")

    server.runs["run-x"] = Misled("x", "plain", run_id="run-x")
    [row] = rows(server.client().run_table(run_ids=["run-x"]).rows)
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


@pytest.mark.slow
def test_more_runs_than_a_comparison_shows_are_counted_on_the_button_the_page_and_its_report(server, http, shown):
    for place in range(70):
        run = GeneratedRun(f"run {place}", "plus", run_id=f"r{place}", steps=20)
        server.runs[run.run_id] = run
    tray = compare_link({f"r{place}": f"run {place}" for place in range(70)})
    assert text(tray) == "Compare 60 of 70 runs Clear"
    [address] = attributes(tray, "href")
    said = by_id(shown(address), "compare-advice")
    assert "Among 60 of 70 runs: " in text(said)
    assert "10 runs are left out and may change the answer: filter the table of runs" in text(said)
    way = next(way for way in attributes(said, "href") if way.startswith("/report"))
    assert "Among 60 of 70 runs: " in http.get(way).get_data(as_text=True)


@pytest.mark.slow
def test_the_table_has_every_column_for_every_run(server):
    client = server.client()
    overviews = {run_id: client.overview(run_id) for run_id in DEMO}
    whole = text(comparison_table(client.compare(DEMO, "edq_ratio").runs, overviews))
    for column in COLUMNS:
        assert column.title in whole
    assert "Collage plus · bfloat16" in whole
    assert " 0 % 12 9,000" in whole


@pytest.mark.slow
def test_stochastic_runs_come_with_a_note_on_their_lost_share(server, shown):
    runs = server.client().compare(["run-live", "run-plain"], "edq_ratio").runs
    for said in (comparison_table(runs, {}), shown("/compare?run=run-live&run=run-plain")):
        assert "the share lost in one step misjudges it" in text(said)
    assert "misjudges" not in text(shown("/compare?run=run-plain"))


def test_the_controls_of_a_comparison_stand_as_the_address_says(shown):
    page = shown("/compare?run=run-plus&run=run-plain&metric=param_norm&axis=tokens&smoothing=0.5")
    told = {name: by_id(page, f"compare-{name}").value for name in ("metric", "axis", "smoothing")}
    assert told == {"metric": "param_norm", "axis": "tokens", "smoothing": 0.5}


def test_a_comparison_opens_with_its_numbers_and_sentences_from_one_question(server, shown):
    said = text(shown("/compare?run=run-plain&run=run-light"))
    assert len(server.asked) == 1
    assert "exp_avg_sq is stuck" in said
    assert "0.913" in said


@pytest.mark.parametrize(
    ("address", "marker", "milliseconds"),
    [
        ("/compare?run=run-plain", "compare-pace", IDLE_MILLISECONDS),
        ("/compare?run=run-plain&run=run-live", "compare-pace", LIVE_MILLISECONDS),
        ("/run/run-plain", "run-pace", IDLE_MILLISECONDS),
        ("/run/run-live", "run-pace", LIVE_MILLISECONDS),
    ],
)
def test_a_page_whose_runs_have_ended_rests_from_its_opening_on(shown, address, marker, milliseconds):
    assert text(by_id(shown(address), marker)) == str(milliseconds)


def test_a_run_page_says_each_fact_once_before_its_details(server, plain, shown):
    overview = server.client().overview("run-plain")
    said = summary(plain, overview)
    numbers = [part for part in components(said) if getattr(part, "className", None) == "number"]
    titles = ["EDQ", "Updates lost", "State decrement, exp_avg_sq", "Validation loss"]
    assert [text(part.children[0]) for part in numbers] == titles
    assert f"Loses {percent(overview.numbers['lost_update_ratio'])} of its updates" in text(said)
    assert text(said).count("over steps 10 to 200") == 1
    tabs = by_id(shown("/run/run-plain"), "run-tab").children[0].children
    assert [part.value for part in tabs] == list(TABS)
    bounds = {"edq_ratio_low": 0.9, "edq_ratio_high": 0.92}
    known = msgspec.structs.replace(overview, numbers={**overview.numbers, **bounds}, now={})
    assert "0.900 … 0.920" in text(summary(plain, known))
    assert "…" not in text(summary(plain, msgspec.structs.replace(known, measured_steps=1))), (
        "one step has no interval"
    )


def test_a_run_that_only_logs_shows_its_logs_and_one_line_and_what_second_writers_log_stands_below(plain):
    """It said three times that no step was measured, over an empty heatmap, table and histogram."""
    run = msgspec.structs.replace(plain, watch=None, latest={})
    said = [summary(run, wire.Overview(run_id="run-plain")), panel(PLAIN, run), *first_curves(PLAIN, run)]
    assert {chart["metric"] for chart in figures(said)} == set(run.scalars)
    assert text(said).count("Logs only: no optimizer is watched.") == 1
    assert not re.search("measured|heatmap", text(said))
    assert list(tabs_of(run)) == ["layers", "about"]
    assert map_style(PLAIN, run)
    content = panel(replace(PLAIN, tab="curves"), msgspec.structs.replace(plain, beside=["evaluator/accuracy"]))
    assert [entry["metric"] for entry in figures(content)] == [*SERIES["curves"], "evaluator/accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("tab", TABS)
def test_every_tab_has_content_and_every_figure_of_it_draws(plain, reader, tab):
    view = replace(PLAIN, tab=tab)
    wanted = figures([panel(view, plain), *first_curves(view, plain)])
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
def test_a_search_finds_curves_by_key_and_by_title_among_all_that_a_run_has(plain, word, found):
    curves = panel(replace(PLAIN, tab="curves", query=word), plain)
    assert sorted(entry["metric"] for entry in figures(curves)) == found
    nothing = panel(replace(PLAIN, tab="curves", query="zzz"), plain)
    assert text(nothing) == "Nothing that this run measures or logs has 'zzz' in its name."


def test_the_heatmap_sorts_worst_first_as_the_table_of_what_loses_most_does(server, reader):
    """EDQ alone puts a layer of next to no updates first, and the table one of many."""
    depth = [layer.name for layer in server.client().layers("run-plain").layers]
    server.worst = [
        wire.LayerLoss(layer=name, share=share, edq_ratio=0.9, lost_update_ratio=0.3)
        for name, share in ((depth[3], 0.7), (depth[1], 0.2))
    ]
    view = replace(PLAIN, order="worst")
    for metric in ("edq_ratio", "lost_update_ratio"):
        shown = list(draw("heatmap", metric, view, reader).data[0].y)
        assert shown[:2] == [depth[3], depth[1]]
        assert sorted(shown) == sorted(depth)
    assert list(draw("heatmap", "param_norm", view, reader).data[0].y)[:2] != [depth[3], depth[1]]


def test_a_layer_and_a_step_narrow_curves_and_histogram(server, reader):
    view = replace(PLAIN, layer="head.weight", step=100)
    assert draw("series", "edq_ratio", view, reader).data[-1].name == "head.weight"
    draw("histogram", "predicted_plain_lost_ratio", view, reader)
    asked = parse_qs(urlsplit(server.asked[-1]).query)
    assert (asked["layer"], asked["step"]) == (["head.weight"], ["100"])
    server.asked.clear()
    draw("series", "loss", view, reader)
    assert any("series" in asked for asked in server.asked)
    assert not any("layer" in asked for asked in server.asked), "a logged scalar is of no layer"


def test_a_run_before_its_first_step_is_no_error(server, reader):
    server.runs["run-new"] = GeneratedRun("new", "plain", run_id="run-new", steps=5, every=10, state="running")
    run = server.client().run("run-new")
    assert run.latest == {}
    for tab in TABS:
        panel(View(page="run", runs=("run-new",), tab=tab), run)
    [row] = server.client().run_table(run_ids=["run-new"]).rows
    assert rows([row])[0]["edq_ratio"] is None


@pytest.mark.parametrize(
    "words",
    [
        "Strategy declared Plain",
        "Strategy observed Plain",
        "the optimizer's own rule in fp64",
        "config: learning_rate 0.0002",
        "Stochastic rounding seen in 1 of 3 layers",
    ],
)
def test_about_tells_declared_from_observed_names_the_source_of_u_and_counts_layers_that_differ(plain, words):
    seen = wire.Fingerprint(layer_rounds_at_random={"0.weight": True, "2.weight": False, "2.bias": False})
    mixed = msgspec.structs.replace(plain.watch, fingerprint=seen)
    assert words in text(about(msgspec.structs.replace(plain, watch=mixed)))


def test_a_slow_server_is_asked_less_often():
    assert milliseconds_after(0.1) == LIVE_MILLISECONDS
    assert milliseconds_after(5.0) == 20_000


def test_the_line_above_the_table_answers(server):
    """It said "6 runs, none of them live." of three that have a problem."""
    said = headline_of(server.client().run_table())
    words = "2 of 6 runs are sick. Worst: plain (loses 33.2 % of its updates). 1 live ."
    assert " ".join(text(said).split()) == words
    assert attributes(said, "href") == ["/run/run-plain", "/runs?state=running"]
    assert headline_of(server.client().run_table(q="plus")) == ["The run is healthy."]
    nothing = wire.RunTable(rows=[], total=2, live={}, healths={"unknown": 2})
    assert headline_of(nothing) == ["No problem is known of 2 runs, 0 of them healthy."]


@pytest.mark.parametrize(
    "address",
    ["/?column=optimizer.lr&where=lr+>+1", "/run/run-plain", "/compare?run=run-plain&run=run-plus", "/incidents"],
)
def test_no_two_parts_of_a_page_have_one_id(shown, address):
    ids = [str(identifier) for identifier in attributes(shown(address), "id")]
    assert len(ids) > 3, "the page is there"
    assert sorted(ids) == sorted(set(ids))


def test_where_all_runs_are_archived_the_table_says_so_and_how_to_show_them(server, shown):
    """It said "No runs yet", and how to train some."""
    server.archived = set(server.runs)
    empty = by_id(shown("/runs"), "runs-empty")
    assert empty.style == {}
    assert "All 6 runs are archived" in text(empty)
    assert attributes(empty, "href") == ["/runs?archived=1"]
    assert by_id(shown("/runs?archived=1"), "runs-empty").style == {"display": "none"}
    server.runs.clear()
    server.archived.clear()
    assert "No runs yet" in text(by_id(shown("/runs"), "runs-empty"))


def test_the_layers_tab_asks_all_its_questions_at_the_same_time(server, reader, plain):
    """It asked five, one after the other."""
    together = threading.Barrier(5)
    server.before_heatmap = lambda: together.wait(timeout=10)
    found = layer_rows(reader, plain.run_id, keys_of_layers(plain), None)
    assert len(found) == len(server.client().layers("run-plain").layers)
    assert together.n_waiting == 0


def test_an_open_page_is_refreshed_when_only_a_second_writer_has_sent_something(server):
    [row] = server.client().run_table(run_ids=["run-plain"]).rows
    later = msgspec.structs.replace(row, reports=row.reports + 1)
    for revision in (run_at, lambda row: comparison_revision(View(page="compare"), [row])):
        assert revision(row) == revision(msgspec.structs.replace(row))
        assert revision(row) != revision(later)


RAISED = raised_run(2000)


@pytest.fixture
def raised(server):
    """A run whose learning rate is tripled at a step: what changed there is told beside its curves."""
    server.runs["run-raised"] = RAISED


def changed(page):
    """The card of what changed: its title, what divides its columns, and the rows that changed."""
    card = by_id(page, "run-change")
    table = next(part for part in components(card) if type(part).__name__ == "Table")
    rows = [part.children for part in components(table) if type(part).__name__ == "TableTr"]
    heads, *said = [[text(cell) for cell in row] for row in rows]
    return text(card), heads, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "title", "before", "after"),
    [
        ("?at=800", "What changed at step 800", "Before, steps 640 to 790", "After, steps 800 to 950"),
        ("?at=800-899", "What changed in steps 800 to 899", "Before, steps 700 to 799", "After, steps 800 to 899"),
    ],
)
def test_the_page_of_a_link_says_what_changed_at_its_steps(raised, shown, search, title, before, after):
    said, heads, rows = changed(shown(f"/run/run-raised{search}"))
    assert title in said
    assert heads[1:3] == [before, after]
    assert rows == [["Learning rate", "0.0002000", "0.0006000", "× 3.00"]]
    assert "that hardly changed" in said


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ("?at=1200", "No reported value changed by more than 10 %."),
        ("?at=1", "Before: no step"),
        ("?at=5000-6000", "After: no step"),
    ],
)
def test_where_nothing_changed_or_a_side_has_no_steps_it_says_so(raised, shown, search, words):
    assert words in changed(shown(f"/run/run-raised{search}"))[0]


def test_the_curves_mark_what_is_picked_and_without_it_nothing_stands_there(raised, reader, shown):
    view = read_address("/run/run-raised", "?at=800-900")
    drawn = draw("first", "loss", view, reader)
    assert sorted({shape.x0 for shape in drawn.layout.shapes if shape.yref == "y domain"}) == [800, 900]
    assert text(by_id(shown("/run/run-raised"), "run-change")) == ""


@pytest.mark.slow
def test_what_changed_is_told_anew_for_other_steps_and_for_new_points_only(raised, http, server, shown):
    page = shown("/run/run-raised")
    revision = by_id(page, "run-revision").data

    def tell(at, told, reported=0):
        asked = {"pathname": "/run/run-raised", "search": f"?at={at}" if at else "", "zooms": 0}
        now = {**revision, "at": f"{revision['at']} {reported}"}
        inputs = [("run-shown", "data", asked), ("run-revision", "data", now)]
        outputs = [("run-change", "children"), ("run-change-told", "data")]
        return answered(http, question(outputs, inputs, [("run-change-told", "data", told)]))

    told = by_id(page, "run-change-told").data
    assert "run-change" not in tell("", told)
    first = tell("800", told)
    assert "What changed at step 800" in str(first["run-change"])
    told = first["run-change-told"]["data"]
    server.asked.clear()
    assert tell("800", told) is None, "another control was moved"
    assert server.asked == []
    assert "run-change" not in tell("800", told, reported=1), "the run has reported, far from there"
    assert "What changed at step 1,200" in str(tell("1200", told)["run-change"])
    assert tell("", told)["run-change"]["children"] is None
