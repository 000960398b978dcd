"""The table of runs: pages, filters and order made by the server, and one evaluation behind every number in it."""

from dataclasses import replace
from functools import partial
from math import inf, nan
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
from collage_server.queries.overview import edq_changes, intended_share
from collage_server.store import Points, schema
from collage_server.store.row_checks import update_rows
from collage_server.store.row_helpers import to_json
from collage_server.summariser import MADE_BY
from sqlalchemy import select

import collage_monitor
from collage_monitor import wire
from collage_monitor.diagnosis import WORDS_VERSION
from collage_monitor.seeds import mean_over_seeds
from collage_monitor.statistics import statistics_for
from tests.server.reads import evaluate_due
from tests.server.samples import LAYERS, STATISTICS, block, report
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow


@pytest.fixture
def evaluate(server):
    """Evaluate what is due now, as the background thread does in its next round."""
    server.state.summariser.stop(PATIENCE_SECONDS)
    return lambda: evaluate_due(server.store)


def table(server, path="/run-table", kind=wire.RunTable, **query):
    return server.get(f"{path}?" + "&".join(f"{name}={value}" for name, value in query.items()), kind)


groups = partial(table, path="/run-groups", kind=wire.RunGroups)


def ids(page):
    return [row.run_id for row in page.rows]


def arrived(step, share):
    values = block(step)
    values[STATISTICS.index("intended_effective_sum")] = share * values[STATISTICS.index("intended_squared_sum")]
    return values


def losing(step, share):
    """So much of each layer's descent arrived, and so many of its updates."""
    values = arrived(step, share)
    elements, idle = (values[STATISTICS.index(name)] for name in ("elements", "idle"))
    values[STATISTICS.index("lost")] = (1 - np.clip(share, 0.0, 1.0)) * (elements - idle)
    return values


def reported(server, run_id, reports, passes=1, **more):
    """A run with these reports, after which so many seconds pass."""
    server.run(run_id, **more)
    server.attempt(run_id, launch_id=f"l{run_id}")
    server.stream(run_id, stream_id=f"s{run_id}", launch_id=f"l{run_id}")
    server.reports(reports, f"s{run_id}")
    server.clock.now += passes


def say(server, said):
    """Write what the overviews of these runs say, by column."""
    with server.store.writing() as connection:
        for run_id, values in said.items():
            update_rows(connection, schema.run_summary, values, schema.run_summary.c.run_id == run_id)


def test_rows_are_filtered_sorted_and_paged_by_the_server(server, evaluate):
    for place, (name, project) in enumerate((("alpha", "p"), ("beta", "q"), ("gamma", "p"))):
        reports = [report(i, 10 + i, values=arrived(10 + i, 0.2 * (place + 1))) for i in range(3)]
        told = {"name": name, "tags": [f"tag-{name}"], "group": "g" if place else None}
        reported(server, f"r{place}", reports, project=project, **told)
    evaluate()
    assert ids(table(server)) == ["r2", "r1", "r0"]
    assert ids(table(server, sort="edq_ratio", descending="false")) == ["r0", "r1", "r2"]
    assert ids(table(server, sort="name", descending="true", offset=1, limit=1)) == ["r1"]
    assert table(server, limit=0).total == 3
    assert ids(table(server, project="p", sort="name", descending="false")) == ["r0", "r2"]
    assert [ids(table(server, q=word)) for word in ("tag-beta", "q", "gamma")] == [["r1"], ["r1"], ["r2"]]
    listed = [server.get(f"/runs?q={word}", wire.RunPage).runs for word in ("tag-beta", "q", "gamma")]
    assert [[run.run_id for run in runs] for runs in listed] == [["r1"], ["r1"], ["r2"]], "one search for both"
    assert ids(table(server, tag="tag-alpha")) == ["r0"]
    assert ids(table(server, group="g", state="running")) == ["r2", "r1"]
    assert ids(table(server, run_id="r1&run_id=gone")) == ["r1"]
    filters = server.get("/run-filters", wire.RunFilters)
    assert filters.project == {"p": 2, "q": 1}
    assert filters.tag == {"tag-alpha": 1, "tag-beta": 1, "tag-gamma": 1}
    server.get("/run-table?sort=nothing", status=422)


@pytest.fixture
def seeds(server, evaluate):
    """Two configurations of plain in two groups, three seeds and one, and one run of another project."""
    losses = {"a0": 2.0, "a1": 2.5, "a2": 3.0, "b0": 4.0, "c0": 1.0}
    for run_id, loss in losses.items():
        values = [arrived(10 + i, 0.5 if run_id == "a1" else 1.0) for i in range(3)]
        reports = [report(i, 10 + i, scalars={"loss": loss}, values=values[i]) for i in range(3)]
        seed = int(run_id[1])
        told = {"group": {"a": "low", "b": "high"}.get(run_id[0]), "seed": seed}
        config = {"lr": 0.1 if run_id[0] == "a" else 0.2, "data_seed": seed}
        reported(server, run_id, reports, project="q" if run_id == "c0" else "p", config=config, **told)
    evaluate()


def listed(page):
    return [entry.group.runs and list(entry.group.runs) if entry.group else entry.run.run_id for entry in page.rows]


def test_runs_that_differ_by_seed_alone_are_one_row(server, seeds):
    loss = mean_over_seeds([2.0, 2.5, 3.0]) or pytest.fail("three values have a mean")
    apart = [["c0"], ["a2", "a1", "a0"], ["b0"]]
    order = {"sort": "loss", "descending": "false"}
    for by, expected in (
        ("strategy", [["c0"], ["b0", "a2", "a1", "a0"]]),
        ("group", apart),
        ("configuration", apart),
    ):
        page = groups(server, by=by, **order)
        assert (listed(page), page.total) == (expected, len(expected))
        single = groups(server, by=by, project="q").rows[0].group
        assert (single.numbers["loss"].count, single.numbers["loss"].spread) == (1, None)
        if by != "strategy":
            row = groups(server, by=by, q="a", project="p", **order).rows[0].group
            assert (row.numbers["loss"].value, row.numbers["loss"].spread) == (loss.value, loss.spread)
            assert (row.count, row.states, row.groups, row.strategy) == (3, {"running": 3}, ["low"], "plain")
            assert (row.health, row.healths["losing updates"]) == ("losing updates", 1)
            assert row.headline == server.get("/runs/a1/overview", wire.Overview).headline


def test_the_run_that_has_most_against_it_speaks_for_its_group(server, seeds):
    for said, speaks in (
        ({"a0": ("healthy", 0.1), "a1": ("losing updates", 0.9), "a2": ("unknown", 0.2)}, "a1"),
        ({"a0": ("healthy", 0.1), "a1": (None, 0.9), "a2": ("unknown", 0.2)}, "a2"),
        ({"a0": ("healthy", 0.5), "a1": ("healthy", 0.4), "a2": ("healthy", 0.6)}, "a1"),
        ({"a0": ("not finite", 0.5), "a1": ("losing updates", None), "a2": ("losing updates", 0.4)}, "a1"),
        ({"a0": ("losing updates", 0.5), "a1": ("not finite", -0.4), "a2": ("healthy", -0.6)}, "a1"),
    ):
        for run_id, (health, edq) in said.items():
            text = to_json(wire.Overview(run_id=run_id, health=health or "unknown", headline=f"of {run_id}"))
            say(server, {run_id: {"health": health, "edq_ratio": edq, "overview": text}})
        [row] = [entry.group for entry in groups(server, by="group").rows if entry.group.groups == ["low"]]
        assert row.headline == f"of {speaks}", said


def test_runs_and_groups_stand_by_how_grave_their_health_is(server, seeds):
    """By the letter, decay that is lost came behind healthy runs, and runs that are not known before sick ones.

    The table names the run with the gravest word, and counts all by health.
    """
    page = table(server)
    assert page.healths["losing updates"] == 1
    assert sum(page.healths.values()) == page.total == 5
    assert (page.worst.run_id, page.worst.name) == ("a1", "a1")
    assert page.worst.short == server.get("/runs/a1/overview", wire.Overview).short
    assert table(server, project="q").worst.run_id == "c0", "a stuck state is less grave"
    assert table(server, q="no such run").worst is None
    said = {"a0": "healthy", "a1": "unknown", "a2": "decay is lost", "b0": "not finite", "c0": None}
    say(server, {run_id: {"health": health} for run_id, health in said.items()})
    graver = {"sort": "health", "descending": "true"}
    assert ids(table(server, **graver)) == ["b0", "a2", "a1", "a0", "c0"]
    assert ids(table(server, sort="health", descending="false")) == ["a0", "a1", "a2", "b0", "c0"]
    assert listed(groups(server, by="group", **graver)) == [["b0"], ["a2", "a1", "a0"], ["c0"]]


def test_an_open_group_is_followed_by_its_runs_on_any_page(server, seeds):
    order = {"by": "group", "sort": "loss", "descending": "false"}
    whole = groups(server, **order)
    opened = f"{quote(whole.rows[1].group.key)}&open={quote(whole.rows[2].group.key)}&open=gone"
    expected = [["c0"], ["a2", "a1", "a0"], "a0", "a1", "a2", ["b0"], "b0"]
    page = groups(server, **order, open=opened)
    assert (listed(page), page.total) == (expected, 7)
    assert page.rows[2].run == table(server, run_id="a0").rows[0]
    for size in (1, 2, 3):
        pages = [groups(server, **order, open=opened, offset=offset, limit=size) for offset in range(0, 9, size)]
        assert [entry for page in pages for entry in listed(page)] == expected
        assert {page.total for page in pages} == {7}
    assert listed(groups(server, **{**order, "descending": "true"}, open=opened))[0] == ["b0"]
    server.get("/run-groups?by=nothing", status=422)


def test_a_group_whose_name_holds_what_parts_a_key_opens_as_well(server):
    for run_id, group in (("odd", "low\x1f\x1ehigh"), ("even", "low")):
        server.run(run_id, project="p", group=group)
    rows = groups(server, by="group").rows
    for entry in rows:
        page = groups(server, by="group", open=quote(entry.group.key))
        [run] = [row.run for row in page.rows if row.run]
        assert list(entry.group.runs) == [run.run_id]
        assert entry.group.groups == [run.group]


def test_a_number_and_the_verdict_that_quotes_it_come_from_one_evaluation(server, evaluate):
    server.filled("r1", "s1", steps=range(10, 60, 10))
    assert table(server).rows[0].overview is None
    assert evaluate() == ["r1"]
    found = server.get("/runs/r1/overview", wire.Overview)
    assert table(server).rows[0].overview == found
    assert (found.first_step, found.last_step, found.measured_steps) == (10, 50, 5)
    merged = server.series("edq_ratio", points=1).values[0]
    assert found.numbers["edq_ratio"] == pytest.approx(merged, rel=1e-12)
    assert f"{merged:.3f}" in found.text + found.headline
    assert table(server).live == {found.health: 1}
    assert evaluate() == []
    server.clock.now += 1
    server.reports([report(9, 90, values=arrived(90, 0.5))], "s1")
    assert evaluate() == ["r1"], "due again when something came"
    assert server.get("/runs/r1/overview", wire.Overview).last_step == 90
    server.send("DELETE", "/runs/r1", kind=wire.Deleted)
    assert (evaluate(), table(server).rows) == ([], [])
    server.get("/runs/r1/overview", status=410)


def test_what_another_release_said_is_said_anew(server, evaluate, monkeypatch):
    """Of a finished run nothing comes any more: its words stayed those of the release that it ended under."""
    server.filled("r1", "s1")
    assert evaluate() == ["r1"]
    with server.store.writing() as connection:
        assert connection.execute(select(schema.run_summary.c.made_by)).scalar_one() == MADE_BY
    assert f"{collage_monitor.__version__}/{WORDS_VERSION}" == MADE_BY, "the contract counts changes of words"
    said = server.get("/runs/r1/overview", wire.Overview)
    old = {"made_by": "another", "made_at": 1.0}
    old["overview"] = to_json(msgspec.structs.replace(said, headline="old words"))
    with server.store.writing() as connection:
        connection.execute(schema.run_summary.update().values(old))
    assert server.get("/runs/r1/overview", wire.Overview) == said
    with server.store.writing() as connection:
        connection.execute(schema.run_summary.update().values({**old, "made_by": None, "made_at": None}))
    server.state.summariser.stopping.clear()
    server.state.summariser.keep_overviews()
    (row,) = table(server).rows
    assert row.overview == said


def test_the_thread_evaluates_by_itself_and_what_it_has_not_is_evaluated_on_request(server):
    server.filled("r1", "s1")
    until(lambda: server.get("/runs/r1/overview", wire.Overview).last_step == 50, "the overview of the last step")
    server.state.summariser.stop(PATIENCE_SECONDS)
    server.filled("r2", "s2")
    assert server.get("/runs/r2/overview", wire.Overview).last_step == 50


@pytest.mark.parametrize(
    ("values", "measured", "since"), [([2.0, nan, 2.0, inf, nan], True, 40), ([2.0, nan], False, 20)]
)
def test_a_loss_that_is_not_finite_is_told_with_its_first_step(server, evaluate, values, measured, since):
    server.filled(steps=())
    logged = [{"loss": loss} for loss in values]
    server.reports([report(i, 10 * i + 10, measured=measured, scalars=told) for i, told in enumerate(logged)])
    evaluate()
    found = server.get("/runs/r1/overview", wire.Overview)
    assert found.health == "not finite"
    assert f"Loss is not finite, since step {since}" in found.headline


@pytest.mark.parametrize(
    ("before", "after", "since", "told"),
    [
        ((1.0, 1.0, 1.0), (1.0, 0.3, 1.0), 310, ", since step 310; blocks.0.weight changed then"),
        ((0.6, 0.6, 1.0), (0.6, 0.6, 0.9), None, ", since the first measured step (10)"),
        ((0.96, 0.96, 0.96), (0.9, 0.9, 0.9), 310, ", since step 310; all 3 layers changed then"),
        ((0.9, 0.9, 0.9), (0.82, 0.82, 0.82), None, "(10), more since step 310; all 3 layers changed then"),
    ],
    ids=["one layer fell", "one layer a little more", "a little, within the bound, then more", "lost more"],
)
def test_since_when_is_that_of_the_loss_and_not_of_some_change(server, evaluate, before, after, since, told):
    noise = np.random.default_rng(0).normal(0, 0.004, (60, len(LAYERS)))
    shares = [np.array(before if step < 310 else after) + noise[step // 10 - 1] for step in range(10, 610, 10)]
    reports = [report(i, 10 * i + 10, values=losing(10 * i + 10, share)) for i, share in enumerate(shares)]
    reported(server, "r1", reports)
    evaluate()
    found = server.get("/runs/r1/overview", wire.Overview)
    assert found.since == since
    assert told in found.headline
    assert ("since" in found.headline.partition(";")[0]) == bool(told)
    assert ("changed then" in found.headline) == ("changed then" in told)


def test_runs_that_are_configured_alike_but_for_seeds_names_and_places_are_told_by_one_word(server):
    configs = {
        "a": {"lr": 1e-3, "seed": 1, "output_dir": "/a", "name": "a", "data": {"path": "corpus"}},
        "b": {"lr": 1e-3, "seed": 2, "output_dir": "/b", "name": "b", "data": {"path": "corpus"}},
        "c": {"lr": 3e-4, "seed": 1, "data": {"path": "corpus"}, "code_version": "9f3"},
        "d": {"lr": 1e-3, "seed": 3, "data": {"path": "corpus"}},
    }
    for run_id, config in configs.items():
        server.run(run_id, project="q" if run_id == "d" else "p", config=config)
    asked = "&run_id=".join(("a", "b", "c", "d"))
    rows = {row.run_id: row for row in table(server, run_id=asked, differing="true").rows}
    kinds = {run_id: row.configuration for run_id, row in rows.items()}
    assert kinds["a"] == kinds["b"]
    assert len(set(kinds.values())) == 3, "another learning rate, another project"
    assert rows["a"].config == {"lr": 1e-3}, "of the code of the first two nothing is known"
    assert rows["c"].config == {"lr": 3e-4, "code_version": "9f3"}
    assert table(server, run_id="a", config="data.path").rows[0].config == {"data.path": "corpus"}
    server.post("/projects/p/runs", wire.RunCreate(run_id="b", config=configs["b"] | {"lr": 2.0}), wire.Run)
    assert table(server, run_id="b").rows[0].configuration not in kinds.values(), "a resume may change it"


def test_people_say_which_runs_count_as_one(server, seeds):
    rows = {row.run_id: row for row in table(server).rows}
    one = wire.RunUpdate(configuration=rows["a0"].configuration)
    server.send("PATCH", "/runs/b0", one, wire.Run)
    told = table(server, run_id="b0").rows[0]
    assert (told.configuration, told.is_treated) == (rows["a0"].configuration, True)
    assert listed(groups(server, by="configuration", project="p")) == [["b0", "a2", "a1", "a0"]]
    server.send("PATCH", "/runs/b0", wire.RunUpdate(configuration=""), wire.Run)
    assert table(server, run_id="b0").rows[0].configuration == rows["b0"].configuration


def test_since_when_is_the_newest_change_that_matters_to_the_step_while_a_run_lives(server, evaluate):
    """It kept "since step 10" of a run that fell further, and placed a fall of a long run to hundreds of steps."""
    reported(server, "r1", [])
    levels = {0: 0.99, 2010: 0.6, 3010: 0.99, 4370: 0.3}
    noise = np.random.default_rng(0).normal(0, 0.004, (600, len(LAYERS)))
    said = []
    for begin, end in ((0, 240), (240, 600)):
        reports = []
        for place in range(begin, end):
            step = 10 * (place + 1)
            level = levels[max(at for at in levels if at <= step)]
            reports.append(report(place, step, values=losing(step, level + noise[place])))
        server.reports(reports, "sr1")
        evaluate()
        found = server.get("/runs/r1/overview", wire.Overview)
        said.append((found.since, [(change.step, round(change.after, 1)) for change in found.changes]))
    assert said == [(2010, [(2010, 0.6)]), (4370, [(2010, 0.6), (3010, 1.0), (4370, 0.3)])]
    assert "since step 4,370" in found.headline


CONDITIONS = {
    "optimizer.lr > 1e-3": ["r2", "r1"],
    "loss >= 2": ["r2", "r1"],
    "config.loss = mse": ["r1"],
    "edq < 50%": ["r1", "r0"],
    "lost >= 0": ["r2", "r1", "r0"],
    "tag = long": ["r0"],
    "tag != long": ["r2", "r1"],
    "judgement = losing updates": ["r1", "r0"],
    "state = running": ["r2", "r1", "r0"],
    "age < 90s": ["r2"],
    "age > 2.5m": ["r0"],
}


@pytest.fixture
def configured(server, evaluate):
    """Three runs a minute apart."""
    configs = [
        {"optimizer": {"lr": 1e-3}, "arch": "gpt", "depth": 12},
        {"optimizer": {"lr": 1e-2}, "arch": "gpt", "loss": "mse"},
        {"optimizer": {"lr": 2}, "arch": "lstm-1"},
    ]
    for place, config in enumerate(configs):
        values = [arrived(10 + i, (0.2, 0.4, 1.0)[place]) for i in range(3)]
        reports = [report(i, 10 + i, scalars={"loss": 1.0 + place}, values=values[i]) for i in range(3)]
        tags = ["long"] if place == 0 else []
        reported(server, f"r{place}", reports, passes=60, name=f"run-{place}", config=config, tags=tags)
    evaluate()


def test_conditions_hold_for_columns_and_for_entries_of_the_configuration(server, configured):
    found = {text: ids(table(server, where=quote(text))) for text in CONDITIONS}
    assert found == CONDITIONS
    both = table(server, where=f"{quote('arch = gpt')}&where={quote('loss < 2')}")
    assert (ids(both), both.total) == (["r0"], 1)
    row = groups(server, by="strategy", where=quote("arch = gpt"), config="optimizer.lr").rows[0].group
    assert row.count == 2
    opened = groups(server, by="strategy", where=quote("depth = 12"), config="depth", open=quote(row.key))
    assert opened.rows[1].run.config == {"depth": 12}
    for text in ("lr", "> 3", "loss > high", "arch < gpt", "age < 3", 'a"b = 1', "tag > x", "age ~ 2d"):
        answer = server.get(f"/run-table?where={quote(text)}", status=422)
        assert (answer.field, text in answer.message) == ("where", True), text


def test_views_are_saved_by_project_under_a_name_replaced_and_deleted(server):
    def save(project, name, search, status=201):
        create = wire.SavedViewCreate(name=name, search=search)
        return server.post(f"/projects/{project}/views", create, wire.SavedView, status)

    kept = [("a/b", "failed", "state=failed"), ("p", "mine", "q=y&by=strategy")]
    for view in (kept[0], ("p", "mine", "q=x"), kept[1]):
        save(*view)
    views = server.get("/views", wire.SavedViewList).views
    assert [(view.project, view.name, view.search) for view in views] == kept
    assert server.get("/views?project=p", wire.SavedViewList).views == views[1:]
    assert server.send("DELETE", "/projects/p/views?name=mine", None, wire.SavedViewList).views == []
    for number in range(200):
        save("p", str(number), "")
    refused = save("p", "one more", "", 422)
    assert (refused.limit, "delete one" in refused.message) == (200, True)
    for name, search in (("", ""), ("a", "a b")):
        save("p", name, search, 422)


MERGED, STEPS = 16, 1600
NOISE = 0.001


def kept(fall, width=MERGED):
    """Points of `width` steps; the last before `fall` arrive whole, all others to the half."""
    edq = 1.0 + NOISE * np.random.default_rng(fall).normal(size=STEPS)
    edq[fall - 1 :] -= 0.5
    last = np.arange(width, STEPS + 1, width)
    arrived = edq.reshape(-1, width).sum(1)
    totals = {"intended_squared_sum": np.full(len(last), float(width)), "intended_effective_sum": arrived}
    assert set(totals) >= set(statistics_for("edq_ratio", intervals=False)) - {"measured_steps"}
    totals["measured_steps"] = np.full(len(last), float(width))
    ones = np.ones(len(last), dtype=np.int64)
    places = {"first_steps": last - width + 1, "steps": last, "times": last.astype(float)}
    return Points(**places, ranks=ones, counts=width * ones, totals=totals)


def some(points: Points, chosen: Any) -> Points:
    names = ("first_steps", "steps", "times", "ranks", "counts")
    columns: dict[str, Any] = {name: getattr(points, name)[chosen] for name in names}
    return replace(points, **columns, totals={name: values[chosen] for name, values in points.totals.items()})


NO_LAYERS = replace(some(kept(801), slice(0)), totals={})


@pytest.mark.parametrize("fall", [801, 808, 816])
@pytest.mark.parametrize("finer", [None, MERGED, MERGED // 4, 1])
def test_a_change_is_placed_within_the_finest_point_that_is_kept(fall, finer):
    def read(first, last):
        points = kept(fall, finer)
        return some(points, (points.first_steps >= first) & (points.steps <= last))

    [found] = edq_changes(kept(fall), NO_LAYERS, read if finer else None)
    width = finer or MERGED
    assert found.last_before < fall <= found.first_changed <= fall + width


def test_the_newest_update_beside_the_usual_one():
    points = kept(801)
    assert intended_share(points) == 1.0
    points.totals["intended_squared_sum"][-1] *= 0.01**2
    assert intended_share(points) == pytest.approx(0.01)
    points.totals["intended_squared_sum"][-30:] = 0.01**2 * MERGED
    assert intended_share(points) == pytest.approx(1.0), "the rate was lowered for good"
    assert intended_share(NO_LAYERS) is None
    for usual, share in ((0.0, None), (np.nan, 1.0)):
        points = kept(801)
        points.totals["intended_squared_sum"][:-1] = usual
        assert intended_share(points) == share
        points.totals["intended_squared_sum"][-1] = np.nan
        assert intended_share(points) is None
