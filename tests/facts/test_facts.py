"""Every sentence, card and table of the pages is true: recomputed in fp64 from the reports that were sent.

The runs are the demo's in small, four sick ones and two healthy ones, all trained for real.
"""

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.app import render
from collage_dashboard.incident_evidence import read_incident_evidence
from collage_dashboard.pages.comparison_content import (
    LOSS,
    RECENT,
    charted_metrics,
    comparison_table,
    read_curves,
    runs_with_throughput,
)
from collage_dashboard.pages.incident_content import body
from collage_dashboard.pages.run_content import TABS
from collage_dashboard.pages.run_layers import keys_of_layers, layer_card, layer_rows
from collage_dashboard.pages.runs_content import rows
from collage_dashboard.pages.strategies_content import advice, pair_question, strategy_table
from collage_dashboard.server_reader import Reader
from collage_dashboard.view import View, read_address, write_steps
from collage_server.app import create_app
from collage_server.settings import Settings
from dash import html
from starlette.testclient import TestClient

from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.client import Client
from collage_monitor.diagnosis import CAVEATS
from collage_monitor.metrics import METRICS
from collage_monitor.recommendation import recommendation
from collage_monitor.strategy_results import results_by_strategy, run_results
from tests.facts import clauses_of_pages
from tests.facts.clauses import CLAUSES, PERCENT, About, assert_share, assert_shown, check_text, first_beyond
from tests.facts.comparing import strategies_of
from tests.facts.raw import RATIOS, RawRun, runs_of
from tests.facts.reading import Card, Table, told_by
from tests.facts.tables import check_card, check_table
from tests.facts.trainings import Kept, reading_client, train_all
from tests.waiting import until

pytestmark = pytest.mark.slow

SICK_OF_DEMO = {"plain bfloat16", "light bfloat16", "resumed without residuals"}
SICK_OF_OTHERS = {"falls in the middle", "torch's AdamW", "not a number", "average stands still"}


@dataclass
class Facts:
    """What was sent, and ways to what is told of it."""

    runs: dict[str, RawRun]
    demo: list[str]
    client: Client
    reader: Reader
    app: Any
    began_at: float
    alerts: tuple[str, ...]

    def about(self, name: str | None = None, compared: list[str] | None = None) -> About:
        sick = SICK_OF_DEMO | SICK_OF_OTHERS
        groups = strategies_of([self.runs[one] for one in compared], sick) if compared else {}
        return About(self.runs, sick, self.runs.get(name or ""), groups, self.began_at, self.alerts)

    def page(self, path: str, search: str = "") -> object:
        with self.app.server.test_request_context("/"):
            return render(read_address(path, search), self.reader)

    def report(self, run_ids: list[str]) -> str:
        question = urlencode([("run", run_id) for run_id in run_ids])
        answer = self.app.server.test_client().get(f"/report?{question}")
        assert answer.status_code == 200
        return str(answer.get_data(as_text=True))


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> Iterator[Facts]:
    """All runs, trained and sent; what the server's own evaluation finds of them has fired."""
    folder, began = tmp_path_factory.mktemp("facts"), time.time()
    with TestClient(create_app(Settings(folder=folder, no_auth=True)), base_url="http://127.0.0.1") as inside:
        client, transport = reading_client(inside), Kept(inside)
        demo, others = train_all(transport, folder)
        runs = runs_of(transport.memory.envelopes, [*demo, *others])
        until(lambda: is_evaluated(client, runs), "the evaluation of all that was sent")
        fire(client, inside.app)
        alerts = tuple(one.alert for one in client.incidents().events)
        names = [name for name, run in runs.items() if run.run_id in demo]
        yield Facts(runs, names, client, Reader(lambda: client), create_dashboard(lambda: client), began, alerts)


def is_evaluated(client: Client, runs: dict[str, RawRun]) -> bool:
    newest = {run.run_id: run.steps[-1] for run in runs.values()}
    return all(row.overview and row.overview.last_step == newest[row.run_id] for row in client.run_table().rows)


def fire(client: Client, app: Any) -> None:
    """Let the server's own evaluation look at the runs as if they still went on."""
    for state in ("running", "finished"):
        for row in client.run_table().rows:
            client.update_run(row.run_id, wire.RunUpdate(state=state))
        if state == "running":
            app.state.collage.summariser.keep_points()
            app.state.alert_threads[0].do_due_work()


def constant() -> set[str]:
    """Texts that say nothing of a run."""
    texts = {CAVEATS, RECENT, *(entry.help for entry in METRICS.values())}
    for entry in ALERTS.values():
        texts |= {entry.meaning, entry.first_step, f"{entry.summary[:1].upper()}{entry.summary[1:]}"}
        texts |= {f"{cause[:1].upper()}{cause[1:]}." for cause in entry.other_causes}
    return texts


CONSTANT = constant()
NEWLINE = "\n"


def check(about: About, tree: object) -> list[str]:
    """What is false among all that the tree tells, with why."""
    false = []
    for told in told_by(tree):
        if isinstance(told, str):
            told = told.removeprefix(CAVEATS).removeprefix(RECENT).strip()
        try:
            if isinstance(told, Card):
                check_card(about, told)
            elif isinstance(told, Table):
                check_table(about, told)
            elif told not in CONSTANT:
                check_text(about, told)
        except (AssertionError, KeyError, ValueError) as problem:
            false.append(
                f"{type(problem).__name__} {str(problem).partition(NEWLINE)[0]}\n    in: {str(told)[:300]}"
            )
    return false


def nothing_false(about: About, *trees: object) -> None:
    """All that the trees tell is true."""
    false = [problem for tree in trees for problem in check(about, tree)]
    assert not false, "\n".join(false)


def compare(facts: Facts, names: list[str]) -> tuple[str, list[str]]:
    ids = [facts.runs[name].run_id for name in names]
    return "?" + urlencode([("run", run_id) for run_id in ids]), ids


def test_what_is_false_is_found(facts):
    """The check itself: a wrong number, a wrong step, a wrong name, and a sentence that it does not know."""
    assert clauses_of_pages.use in [check for _, check in CLAUSES]
    run = facts.runs["plain bfloat16"]
    lost = run.metric("lost_update_ratio", run.recent)
    true = f"Loses {100 * lost:.1f} % of its updates; exp_avg_sq is stuck, from the start."
    assert not check(facts.about("plain bfloat16"), html.P(true))
    for false in (
        f"Loses {100 * lost + 0.2:.1f} % of its updates; exp_avg_sq is stuck, from the start.",
        true.replace("from the start", "since step 4"),
        true.replace("exp_avg_sq", "exp_avg"),
        "It lost 3 socks.",
        "head.weight is to blame.",
    ):
        assert len(check(facts.about("plain bfloat16"), html.P(false))) == 1, false


@pytest.mark.parametrize("search", ["", "?by=strategy", "?by=configuration"])
def test_the_line_above_the_table_of_runs(facts, search):
    nothing_false(facts.about(), facts.page("/runs", search))


def test_each_row_of_the_table_of_runs(facts):
    found = rows(facts.client.run_table().rows)
    assert {row["name"] for row in found} == set(facts.runs)
    for row in found:
        run, about = facts.runs[row["name"]], facts.about(row["name"])
        nothing_false(about, html.P(row["brief"]), html.P(row["headline"]))
        assert (row["health"] == "healthy") == (row["name"] not in about.sick)
        assert row["last_step"] == run.last_step
        for key in ("edq_ratio", "lost_update_ratio", "state_decrement_ratio/exp_avg_sq"):
            assert row[key.partition("/")[0]] == pytest.approx(run.metric(key, run.recent), rel=1e-9)
        for key in ("loss", "validation_loss", "bytes_per_parameter", "tokens_per_second"):
            assert wire.from_number(row[key]) == pytest.approx(run.newest(key)[1], rel=1e-9, nan_ok=True)
        curve = [value for value in run.curve("edq_ratio").values() if not np.isnan(value)]
        assert len(row["trend"]) == min(len(curve), 32)
        assert all(np.isclose(curve, value, rtol=1e-3, atol=1e-9).any() for value in row["trend"])


@pytest.mark.parametrize("tab", TABS)
def test_the_page_of_each_run(facts, tab):
    for name in facts.runs if tab in {"layers", "about"} else ["falls in the middle"]:
        run = facts.runs[name]
        nothing_false(facts.about(name), facts.page(f"/run/{run.run_id}", f"?tab={tab}"))


def test_each_row_of_the_table_of_layers(facts):
    for name, raw in facts.runs.items():
        run, steps = facts.client.run(raw.run_id), raw.recent
        found = layer_rows(facts.reader, run.run_id, keys_of_layers(run), steps[0])
        assert sorted(row["layer"] for row in found) == sorted(raw.layers)
        for row in found:
            own = [row["layer"]]
            assert row["share"] == pytest.approx(raw.share_of_loss(row["layer"], steps), rel=1e-6, abs=1e-9)
            for key in ("edq_ratio", "lost_update_ratio", "half_ulp_margin"):
                assert_same(row[key], raw.metric(key, steps, own), f"{key} of {row['layer']} of {name}")
            since = first_beyond(raw.curve("lost_update_ratio", own), 0.05, below=False)
            assert row["since"] == (None if since is None else since[1]), f"{row['layer']} of {name}"


@pytest.mark.parametrize("step", [None, 40])
def test_the_card_of_each_layer(facts, step):
    for name in ("falls in the middle", "light bfloat16"):
        raw = facts.runs[name]
        run, steps = facts.client.run(raw.run_id), raw.recent if step is None else [step]
        for layer in raw.layers:
            view = View(page="run", runs=(raw.run_id,), layer=layer, step=step)
            card = layer_card(view, run, facts.reader, steps[0])
            for told in told_by(card):
                if isinstance(told, Card) and told.metric.partition("/")[0] in {*RATIOS, "lost_update_ratio"}:
                    value = re.match(r"\S+(?: %| or (?:more|less))?", told.lines[0])
                    assert value
                    assert_shown(value[0], raw.metric(told.metric, steps, [layer]), f"{told.metric} of {layer}")
                elif isinstance(told, str) and " · " in told:
                    facts_of_layer(raw, layer, steps, told)


def facts_of_layer(raw: RawRun, layer: str, steps: list[int], told: str) -> None:
    found = re.search(rf"([\d,]+) elements · {PERCENT} of .*?([\d,]+)$", told)
    assert found, told
    assert_shown(found[1], raw.sizes[layer])
    assert_share(found[2], raw.share_of_elements([layer]))
    assert int(found[3]) == steps[-1]


def assert_same(found: float | None, true: float, what: str) -> None:
    if np.isnan(true):
        assert found is None, what
    else:
        assert found == pytest.approx(true, rel=1e-6, abs=1e-12), what


COMPARED = {
    "the demo": ["plain float32", *(f"{name} bfloat16" for name in ("plain", "light", "plus", "master-weights"))],
    "with the resumed run": [],
    "two seeds": [
        "plain float32",
        *(f"{name} bfloat16{seed}" for name in ("plus", "master-weights") for seed in ("", ", seed 2")),
    ],
}


@pytest.mark.parametrize("which", COMPARED)
def test_a_comparison_as_it_opens_and_with_its_curves(facts, which):
    names = COMPARED[which] or facts.demo
    search, ids = compare(facts, names)
    nothing_false(facts.about(None, names), facts.page("/compare", search))
    table = {row.run_id: row for row in facts.client.run_table(run_ids=ids, differing=True).rows}
    found = [table[run_id] for run_id in ids]
    view = read_address("/compare", search)
    metrics = charted_metrics(found)
    runs = runs_with_throughput(facts.reader, read_curves(facts.reader, view, found, metrics)[metrics[LOSS]])
    assert runs is not None
    results = results_by_strategy(run_results(found, runs))
    told = (
        advice(recommendation(results), view, results),
        strategy_table(results),
        comparison_table(runs, {row.run_id: row.overview for row in found}),
    )
    nothing_false(facts.about(None, names), *told)
    titles = [result.title for result in results]
    for pair in itertools.combinations(titles, 2):
        nothing_false(facts.about(None, names), pair_question(replace(view, pair=pair), results))


def test_incidents(facts):
    found = facts.client.incidents().events
    assert {one.alert for one in found} == {"CollageResidualsOff", "CollageNotFinite"}
    nothing_false(facts.about(), facts.page("/incidents"))
    for incident in found:
        about = facts.about(incident.labels["run"])
        evidence = read_incident_evidence(facts.client, incident)
        nothing_false(about, facts.page(f"/incident/{incident.incident_id}"), body(evidence))


PICKED = ((62, 62), (41, 60), (1, 1))


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.nightly) for turn in (1, 2))])
def test_what_changed_at_a_step_or_in_a_range_that_a_reader_picks(facts, turn):
    """By day of each run one of them, at night each."""
    for place, (name, run) in enumerate(facts.runs.items()):
        picked = PICKED[(place + turn) % len(PICKED)]
        about = facts.about(name)
        about.picked = picked
        shown = facts.page(f"/run/{run.run_id}", f"?tab=about&at={write_steps(picked)}")
        tables = [told for told in told_by(shown) if isinstance(told, Table) and told.heads[-1:] == ("Change",)]
        rows = [row for table in tables for row in table.rows]
        assert len(rows) > 10, f"{name} has no table of what changed"
        nothing_false(about, shown)
        titles = {title for title, *_ in rows}
        assert {"EDQ", "Updates lost", "Training loss"} <= titles, f"{name}: {titles}"


@pytest.mark.parametrize("name", ["plain bfloat16", "falls in the middle", "not a number", "plus bfloat16, seed 2"])
def test_the_report_on_a_run(facts, name):
    nothing_false(facts.about(name), facts.report([facts.runs[name].run_id]))


@pytest.mark.parametrize("which", COMPARED)
def test_the_report_on_a_comparison(facts, which):
    names = COMPARED[which] or facts.demo
    nothing_false(facts.about(None, names), facts.report(compare(facts, names)[1]))
