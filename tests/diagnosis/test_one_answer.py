"""Forty short trainings drawn by seed, sick, healthy, cured, resumed, scheduled or faulty: wherever a run is told
of, it has the same problem with the same number.

The places are the training process, the server, the terminal, the pages, the HTML report, `/metrics` and incidents.
Onsets, present values and intervals are held against each measured step as the server returns it.
"""

import math
import random
from dataclasses import dataclass, replace
from html import unescape
from itertools import pairwise
from typing import Any

import collage_agent as collage
import msgspec
import pytest
import torch
from click.testing import CliRunner
from collage_agent import init
from collage_agent.session import _SESSION
from collage_dashboard.app import render
from collage_dashboard.html_report import report
from collage_dashboard.pages.runs_content import rows
from collage_dashboard.server_reader import Reader
from collage_dashboard.view import read_address
from collage_optim import CollageAdamW
from prometheus_client.parser import text_string_to_metric_families

from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.client import Client
from collage_monitor.command import root
from collage_monitor.command import server as options_of_server
from collage_monitor.diagnosis import NOW_STEPS, finite
from collage_monitor.number_text import value_text
from tests.agent.training import mlp, train
from tests.agent_delivery.test_attempts import Application
from tests.alerts.test_evaluator import SECONDS, evaluator, incidents
from tests.dashboard.test_html_report import Page
from tests.dashboard.walk import text
from tests.server.reads import evaluate_due
from tests.server.samples import report as report_of
from tests.waiting import PATIENCE_SECONDS

KINDS = ["plain", "healthy", "converted", "resumed", "to zero", "warm-up", "one step"]
KINDS += ["standing layer", "not finite", "long"]
CHANGES = {"converted": "split-master", "long": "plain"}
"""The strategy from the middle on: a cure, or an illness of a run whose older steps are merged."""
HEALTHY = ("split-master", "kahan", "master-weights", "float32")


pytestmark = [pytest.mark.slow, pytest.mark.drawn(by=lambda seed: (KINDS[seed % len(KINDS)],))]

TRACKED = ("edq_ratio", "lost_update_ratio", "state_decrement_ratio")
ADDRESS = "http://127.0.0.1"
ROUND_SECONDS = 5 * SECONDS
"""As when a server is busy: of an alert that waits for half an hour, few rounds."""


@dataclass(frozen=True)
class Training:
    """One drawn training."""

    kind: str
    strategy: str
    lr: float
    beta2: float
    steps: int
    every: int
    oracle: bool
    cosine: bool

    def rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, …"""
        done = step / self.steps
        if self.kind == "warm-up":
            return self.lr * min(1.0, 2 * done)
        if self.kind == "to zero":
            return self.lr * (0.5 * (1 + math.cos(math.pi * done)) if self.cosine else 1 - done)
        return self.lr


def draw(seed: int) -> Training:
    """The training of this seed; each kind comes once in ten."""
    random_, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    drawn = Training(
        kind=kind,
        strategy={"healthy": random_.choice(HEALTHY), "long": "split-master"}.get(kind, "plain"),
        lr=10 ** random_.uniform(-4.5, -2.5),
        beta2=random_.choice([0.95, 0.999]),
        steps=random_.randint(150, 330) if kind == "long" else random_.randint(30, 100),
        every=random_.choice([1, 1, 2, 5]),
        oracle=random_.random() < 0.5,
        cosine=random_.random() < 0.5,
    )
    changes: dict[str, dict[str, Any]] = {
        "one step": {"steps": 3, "every": 1000},
        "long": {"every": 1},
        "standing layer": {"lr": 3e-3},
    }
    return replace(drawn, **changes.get(kind, {}))


def optimizer_of(training, model):
    standing = list(model[2].parameters()) if training.kind == "standing layer" else []
    moving = [own for own in model.parameters() if not any(own is other for other in standing)]
    # In the standing layer no update reaches half a gap.
    groups: list[dict[str, Any]] = [{"params": moving}, *([{"params": standing, "lr": 1e-6}] if standing else [])]
    options: dict[str, Any] = {"lr": training.lr, "betas": (0.9, training.beta2)}
    if training.strategy == "float32":
        return torch.optim.AdamW(groups, **options)
    return CollageAdamW(groups, strategy=training.strategy, **options)


def trained(training, application):
    """The open run of the training with all its reports sent, and its watch."""
    run = init("p", training.kind, run_id="drawn", transport=application)
    model = mlp(dtype=torch.float32 if training.strategy == "float32" else torch.bfloat16)
    optimizer = optimizer_of(training, model)

    def watched():
        options = {"every": training.every, "oracle": training.oracle, "sample": "all"}
        return collage.watch(model, optimizer, budget=None, **options)

    handle, middle = watched(), training.steps // 2
    for step in range(training.steps):
        optimizer.param_groups[0]["lr"] = training.rate_at(step)
        if training.kind in CHANGES and step == middle:
            optimizer.param_groups[0]["strategy"] = CHANGES[training.kind]
        if training.kind == "resumed" and step == middle:
            handle.remove()
            run.stop(PATIENCE_SECONDS)
            _SESSION.run = None
            run, handle = init("p", training.kind, run_id="drawn", transport=application), watched()
        if training.kind == "not finite" and step == middle:
            model[2].weight.data[0, 0] = math.nan
        train(model, optimizer, 1, start=step)
    run.stop(PATIENCE_SECONDS)
    return handle


def numbers(findings):
    """What each finding says, in figures."""
    return [
        (own.health, own.key, own.layer, own.alert, *(pytest.approx(value) for value in (own.value, own.now)))
        for own in findings
    ]


def terminal(*words):
    return CliRunner().invoke(root, [*words, "drawn", "--server-url", ADDRESS])


def fired_incidents(inside, judged):
    """The incidents after the longest wait of an alert, in a run that lives and is beyond its warm-up."""
    names = [own.alert for own in judged.against if own.alert]
    work, wait = evaluator(inside, *names), max(ALERTS[name].for_seconds for name in names)
    stream = inside.get("/runs/drawn/streams", wire.StreamList).streams[-1]
    for place in range(math.ceil(wait / ROUND_SECONDS) + 2):
        inside.clock.now += ROUND_SECONDS
        logged = report_of(100_000 + place, 5_000 + place, measured=False, scalars={"tokens": 3.0})
        inside.reports([logged], stream.stream_id)
        if place == 0:
            evaluate_due(inside.app.state.collage.store)
        work.do_due_work()
    return {own.alert: own for own in incidents(inside)}


@pytest.mark.parametrize("seed", range(40))
def test_a_run_has_one_answer_wherever_it_is_told(seed, served, monkeypatch):
    (inside, client), training = served, draw(seed)
    handle = trained(training, Application(inside.client))
    evaluate_due(inside.app.state.collage.store)
    there = client.overview("drawn", fresh=True)
    check_process_and_server(training, handle, there, client.overview("drawn"))
    check_terminal(there, monkeypatch, lambda *_: Client(ADDRESS, transport=inside.transport()))
    check_pages(there, client)
    check_metrics(there, inside)
    for finding in there.against:
        check_since(finding, client)
    check_now_and_intervals(there, str(handle), client)
    assert training.kind != "converted" or not there.against, there.text
    if any(own.alert for own in there.against):
        check_incidents(there, fired_incidents(inside, there))


def check_process_and_server(training, handle, there, kept):
    here, printed = handle.judgement(), str(handle)
    fresh = {"numbers": kept.numbers | there.numbers, "now": kept.now | there.now}
    assert msgspec.structs.replace(kept, **fresh) == there, "a fresh overview only has more numbers"
    assert numbers(here.findings) == numbers(there.findings)
    for name in ("health", "short", "text", "advised", "first_step", "last_step", "measured"):
        assert getattr(here, name) == getattr(there, name)
    # A process knows no launch before its own, and merges its older steps.
    if training.kind not in {"resumed", "long"}:
        own = handle.evidence().model
        for key, value in ((key, value) for key, value in there.numbers.items() if key in own):
            known = finite(own[key])
            assert finite(value) == (None if known is None else pytest.approx(known, rel=1e-6)), key
        assert here.headline == there.headline
        assert [own.since for own in here.findings] == [own.since for own in there.findings]
    assert f": {here.health}" in printed.splitlines()[0]
    assert here.text in printed
    assert here.text in unescape(handle._repr_html_())
    assert here.headline in printed or not here.against


def check_terminal(there, monkeypatch, new_client):
    monkeypatch.setattr(options_of_server, "Client", new_client)
    shown, checked = terminal("show"), terminal("check")
    assert shown.exit_code == 0, shown.output
    assert checked.exit_code == int(bool(there.against)), checked.output
    assert f"teps {there.last_step} to {there.last_step}" not in shown.output
    said = there.headline if there.against else there.text
    whole = terminal("show", "--all").output
    assert there.text in whole
    for answer in (shown.output, whole, checked.output):
        for told in (there.health, said, there.advised):
            assert told in answer


def check_pages(there, client):
    reader = Reader(lambda: client)
    said = text(render(read_address("/run/drawn", ""), reader))
    written = Page(report(reader, ["drawn"])).words
    for told in (there.headline, there.text, there.advised):
        assert told in said
        assert " ".join(told.split()) in " ".join(written.split())
    (row,) = client.run_table().rows
    bounded = any(key.endswith("_low") for key in row.overview.numbers)
    assert bounded == ("95 % interval" in written), "intervals are named where there are some"
    (cells,) = rows([row])
    assert (cells["health"], cells["headline"]) == (there.health, there.headline)
    for key in ("edq_ratio", "lost_update_ratio"):
        assert cells[key] == there.numbers.get(key)
        shown = value_text(key, cells[key])
        assert shown in said
        assert shown in written or cells[key] is None


def check_metrics(there, inside):
    families = text_string_to_metric_families(inside.get("/metrics"))
    samples = [own for family in families for own in family.samples if own.name == "collage_finding"]
    shown: list[Any] = sorted(
        (own.labels["key"], own.labels.get("layer", ""), own.labels.get("alert", ""), own.value) for own in samples
    )
    held: list[Any] = sorted(
        (own.key, own.layer or "", own.alert, own.value) for own in there.against if own.value is not None
    )
    assert shown == [(key, layer, alert, pytest.approx(value)) for key, layer, alert, value in held]


def is_beyond(finding, value):
    below = finding.key != "lost_update_ratio" and finding.health != "steps are off"
    return value < finding.threshold if below else value > finding.threshold


def check_since(finding, client):
    """`since` is the first measured step from which no two steps in a row are on the good side."""
    if finding.key.partition("/")[0] not in TRACKED:
        assert finding.since is None
        return
    series = client.series("drawn", finding.key, layer=finding.layer, points=10_000)
    known = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if value is not None]
    steps, beyond = [step for step, _ in known], [is_beyond(finding, value) for _, value in known]

    if finding.since is None and not finding.since_words:
        assert len(steps) < 2 or not (beyond[-1] and beyond[-2]), finding
        return
    place = steps.index(finding.since) if finding.since else 1
    assert all(one or other for one, other in pairwise(beyond[place:])), (finding, known)
    if finding.since is None:
        assert beyond[0] or beyond[1], (finding, known)
        whole = series.steps[0] <= 1 and steps[0] in series.steps[:2]
        words = ", from the start" if whole else f", since the first measured step ({steps[0]:,})"
    else:
        assert beyond[place], (finding, known)
        assert not beyond[place - 1], (finding, known)
        words = f", since step {finding.since:,}"
    assert finding.since_words == words


def check_now_and_intervals(there, printed, client):
    one_step = there.first_step == there.last_step
    for key in there.numbers:
        whole = key.removesuffix("_low").removesuffix("_high")
        assert whole == key or not (one_step or whole in there.now), f"{key}: an interval of one step, or of a mean"
    arrived = [line for line in printed.splitlines() if "descent that arrived" in line]
    assert not one_step or not any(" to " in line for line in arrived)
    steps = client.series("drawn", "elements", points=10_000).steps
    for key, value in there.now.items():
        assert not key.endswith(("_low", "_high")), "the end of an interval is no number that moves"
        # Points of a long recent past hold several steps each.
        newest = [
            client.series("drawn", key, points=1, first_step=steps[-count]).values[0]
            for count in range(NOW_STEPS, min(2 * NOW_STEPS, len(steps)))
        ]
        assert any(value == pytest.approx(own) for own in newest), (key, value, newest)
    for finding in there.against:
        assert finding.now is None or finding.now == there.now[finding.key]


def check_incidents(there, fired):
    for finding in (own for own in there.against if own.alert):
        # At the end of a schedule alerts are silent.
        intends = there.intended_share is None or there.intended_share >= ALERTS[finding.alert].least_intended_share
        assert (finding.alert in fired) == intends
        if not intends:
            continue
        told = fired[finding.alert]
        assert told.value == pytest.approx(finding.value)
        assert f"Judged {there.health}: {there.text}" in told.text
        assert there.headline in told.text or there.headline.rstrip(".").casefold() in there.text.casefold()
        assert there.advised in told.text
