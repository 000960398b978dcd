"""What pages say around a run's verdict: heads, the table's line, what to train with, and incidents."""

import re
import time
from calendar import timegm
from collections.abc import Sequence

import numpy as np

from collage_monitor.strategies import strategy_title
from tests.facts.clauses import (
    LAYER,
    NUMBER,
    PERCENT,
    SECONDS_AFTER,
    SECONDS_BEFORE,
    STEP,
    About,
    assert_share,
    assert_shown,
    check_clause,
    check_text,
    counts,
    onset_of,
    says,
    step_of,
)
from tests.facts.comparing import StrategyGroup

MOMENT = r"(\d{4}-\d\d-\d\d \d\d:\d\d) UTC"
SIGNED = r"([+−-]?\d+(?:\.\d+)?(?:e[−-]?\d+)?)"
SMALL = 0.005
"""Of the reference's loss: a gap below it is none."""


def assert_now(about: About, text: str) -> None:
    """A moment of this test."""
    seconds = timegm(time.strptime(text, "%Y-%m-%d %H:%M"))
    assert about.began_at - SECONDS_BEFORE <= seconds <= time.time() + SECONDS_AFTER


# --- The table of runs, and a run's head ---

counts(rf"{NUMBER} of {NUMBER} runs are sick", lambda about: (len(about.sick), len(about.runs)))
counts(rf"step {STEP}", lambda about: (about.the_run.last_step,))
counts(rf"Collage\w+ at step {STEP}", lambda about: (about.the_run.last_step,))
counts(rf"lost at a resume at step {STEP}", lambda about: (about.the_run.begins[-1],))
counts(rf"{NUMBER} (?:incidents open|fired in the last 12 hours)", lambda about: (len(about.alerts),))
counts(
    rf"layers that changed, {NUMBER} of {NUMBER}",
    lambda about: (len(onset_of(about.the_run, about.changed)[5]), len(about.the_run.layers)),
)


@says(r"incidents / (.+)")
def crumbs_of_an_incident(about: About, name: str) -> None:
    assert about.the_run.created.name == name


@says(r"worst: (.+?) \((.+)\)")
def the_worst(about: About, name: str, clause: str) -> None:
    assert name in about.sick
    about.run = about.runs[name]
    check_clause(about, clause)


@says(r"(finished|running|failed|stale) (.+)")
def head_of_a_run(about: About, _state: str, kept: str) -> None:
    watch = about.the_run.watch
    assert kept == f"{strategy_title(watch.strategy)} {watch.dtype} {watch.optimizer}"


@says(rf"(\w+) · (.+) · (?:finished|running), step {STEP} · updated {MOMENT}")
def head_of_a_report(about: About, project: str, kept: str, step: str, moment: str) -> None:
    run = about.the_run
    assert project == run.project
    assert kept == strategy_title(run.watch.strategy, run.watch.dtype)
    assert step_of(step) == run.last_step
    assert_now(about, moment)


@says(rf"(?:updated|written) {MOMENT}(?: by Collage Monitor [\d.]+)?")
def written(about: About, moment: str) -> None:
    assert_now(about, moment)


@says(r"marked in the curves: (.+)")
def marked(about: About, marks: str) -> None:
    for mark in marks.split(" · "):
        check_clause(about, mark)


@says(rf"EDQ (falls|rises) to {NUMBER} at step {STEP}")
def edq_marked(about: About, way: str, value: str, step: str) -> None:
    _, changed, _, before, after, _ = onset_of(about.the_run, "edq_ratio")
    assert changed == step_of(step)
    assert (after < before) == (way == "falls")
    assert_shown(value, after)


@says(rf"attempt {NUMBER}(?: began)? at step {STEP}(?:: older attempts' points from there on are hidden)?")
def attempt_began(about: About, attempt: str, step: str) -> None:
    assert about.the_run.begins[int(attempt) - 1] == step_of(step)


@says(rf"what changed (?:at step|in steps) {STEP}(?: to {STEP})?")
def what_changed_at(about: About, first: str, last: str | None) -> None:
    assert (step_of(first), step_of(last or first)) == about.picked


# --- What to train with ---


def strategy(about: About, title: str) -> StrategyGroup:
    return about.strategies[title]


def reference_of(about: About) -> StrategyGroup:
    return about.strategies["Plain · float32"]


def fitting(about: About) -> list[StrategyGroup]:
    """Those that are healthy, and whose loss is not shown to be noticeably above the reference's."""
    reference, limit = reference_of(about), SMALL * reference_of(about).loss_of()
    found = {id(one): one for one in about.strategies.values() if one.is_healthy}
    gaps = {key: one.gap(reference)[:2] for key, one in found.items()}
    return [one for key, one in found.items() if (half := gaps[key][1]) is None or gaps[key][0] - half <= limit]


def assert_fitting(about: About, titles: Sequence[str], size: str, count: str | None = None) -> None:
    """All of them are named, the smallest first, or so many."""
    fit = fitting(about)
    groups = [strategy(about, title) for title in titles]
    assert all(group in fit for group in groups)
    assert len(fit) == (len(groups) if count is None else int(count))
    smallest = min(round(one.mean_of("bytes_per_parameter"), 1) for one in fit)
    assert smallest == round(groups[0].mean_of("bytes_per_parameter"), 1) == float(size)


@says(rf"use (.+): all (\d+) keep their updates \({NUMBER} bytes a parameter\)")
def use(about: About, title: str, count: str, size: str) -> None:
    assert_fitting(about, [title], size, count)


@says(rf"use (.+?): (?:all \d+|both) keep their updates, (.+?) in the fewest bytes \({NUMBER} bytes a parameter\)")
def use_one_of(about: About, titles: str, smallest: str, size: str) -> None:
    named = re.split(r", | or ", titles)
    assert named[0] == smallest
    assert_fitting(about, named, size)


@says(
    rf"loss {SIGNED} against (.+?)"
    rf"(?: \(95 %: {SIGNED} to {SIGNED}, (\d+) seeds\)|, one run each: repeat with other seeds)"
)
def loss_against(about: About, loss: str, reference: str, *sure: str) -> None:
    fit = min(fitting(about), key=lambda one: one.mean_of("bytes_per_parameter"))
    gap, half, pairs = fit.gap(reference_of(about))
    assert_shown(loss, gap)
    assert reference == reference_of(about).title
    if half is None:
        assert not any(sure)
    else:
        for text, end in zip(sure[:2], (gap - half, gap + half), strict=True):
            assert_shown(text, end)
        assert int(sure[2]) == pairs


@says(
    r"its loss cannot be compared with the reference's yet|more seeds would tell if it is worse"
    r"|means over a strategy's runs, ± the standard deviation of one|below the gap its 95 % interval"
    r"|small print is the 95 % interval"
)
def beside_numbers(_about: About) -> None:
    """Said where an interval is not known, or reaches beyond what counts; it is checked where it stands."""


@says(
    rf"(.+ · (?:bfloat16|float32)): {NUMBER} bytes a parameter(?:, the reference)?"
    rf"(?:, loss {SIGNED} \(([+−]?){PERCENT}\))?(?:, (.+))?"
)
def reason(about: About, title: str, size: str, *rests: str | None) -> None:
    loss, sign, share, rest = rests
    group, reference = strategy(about, title), reference_of(about)
    assert_shown(size, group.mean_of("bytes_per_parameter"))
    if loss is not None and share is not None:
        gap = group.gap(reference)[0]
        assert_shown(loss, gap, f"gap of {title}")
        over = gap / reference.loss_of()
        assert_share(share, abs(over))
        assert sign == ("" if abs(over) < 5e-5 else "−" if over < 0 else "+")
    ill = [run for run in group.runs if run.created.name in about.sick]
    assert (rest == "healthy") == (not ill)
    if not ill or rest is None:
        return
    about.run = ill[0]
    if told := re.fullmatch(r"(\d+) of (\d+) runs: (.+)", rest):
        assert (int(told[1]), int(told[2])) == (len(ill), len(group.runs))
        rest = told[3]
    if told := re.fullmatch(rf"losing updates, {PERCENT} on average", rest):
        shares = [run.metric("lost_update_ratio", run.recent) for run in ill]
        assert_share(told[1], sum(shares) / len(shares))
        return
    check_clause(about, rest)


@says(r"(.+ · (?:bfloat16|float32))(?: \((\d+) runs\))?")
def legend_of_a_strategy(about: About, title: str, count: str | None) -> None:
    assert count is None or int(count) == len(strategy(about, title).runs)


@says(r"(.+): (losing updates|states are stuck|not finite|steps are off|average is off)")
def strategy_is_ill(about: About, title: str, _health: str) -> None:
    assert not strategy(about, title).is_healthy


@says(r"(.+): not compared here")
def not_compared(about: About, title: str) -> None:
    assert title not in about.strategies


@says(rf"in {NUMBER} bytes a parameter the most exact on given gradients \(docs/[\w/.-]+\)")
def most_exact(about: About, size: str) -> None:
    assert float(size) <= min(
        group.mean_of("bytes_per_parameter") for group in about.strategies.values() if group.is_healthy
    )


@says(
    r"(.+?)'s loss cannot be held against (.+)'s(?: for (\S+) bytes? more)? yet: none of both was read at one step"
)
def worth_unknown(about: About, one: str, other: str, more: str | None) -> None:
    assert_more_bytes(about, one, other, more)


@says(
    rf"(.+?)'s loss is {SIGNED} (lower|higher) than (.+?)'s(?: for (\S+) bytes? more)?(, which may be chance)?"
    rf"(?: \(95 %: {SIGNED} to {SIGNED}, (\d+) pairs\))?"
)
def worth_known(about: About, one: str, by: str, way: str, other: str, *told: str) -> None:
    more, chance, low, high, count = told
    assert_more_bytes(about, one, other, more)
    gap, half, pairs = strategy(about, one).gap(strategy(about, other))
    assert (gap < 0) == (way == "lower")
    assert_shown(by, abs(gap))
    assert (half is None) == (count is None)
    if half is None:
        return
    may_be_chance = gap - half <= 0 <= gap + half
    assert may_be_chance == bool(chance)
    ends = (gap - half, gap + half) if may_be_chance else sorted((abs(gap - half), abs(gap + half)))
    for text, end in zip((low, high), ends, strict=True):
        assert_shown(text, end)
    assert int(count) == pairs


@says(r"take neither")
def take_neither(about: About) -> None:
    assert sum(not one.is_healthy for one in about.strategies.values()) > 1


def assert_more_bytes(about: About, one: str, other: str, more: str | None) -> None:
    sizes = [strategy(about, title).mean_of("bytes_per_parameter") for title in (one, other)]
    assert_shown(more or "0", round(sizes[0] - sizes[1], 1))


@says(rf"losses are the validation losses at step {STEP}")
def where_losses_stand(about: About, step: str) -> None:
    everything = next(iter(about.strategies.values())).everything
    without = [run.created.name for run in everything if step_of(step) not in run.scalars["validation_loss"]]
    assert not without, f"at step {step} no validation loss was logged by {without}"


@says(rf"{NUMBER} runs of (\w+)")
def runs_of_project(about: About, count: str, project: str) -> None:
    everything = next(iter(about.strategies.values())).everything
    assert int(count) == len(everything)
    assert {run.project for run in everything} == {project}


# --- Incidents ---


@says(rf"(Collage\w+) fired {MOMENT}(?: at step {STEP})?, and is open")
def fired(about: About, alert: str, moment: str, step: str | None) -> None:
    assert alert in about.alerts
    assert_now(about, moment)
    assert step is None or step_of(step) == about.the_run.last_step


@says(r"at the time: (.+)|judged [\w ]+?: (.+)|ruled out: (.+)|evidence for it: (.+)|cannot be told .+?: (.+)")
def prefixed(about: About, *clauses: str | None) -> None:
    for clause in filter(None, clauses):
        check_text(about, clause)


@says(rf"at the resume at step {STEP}, {PERCENT} of the residuals were dropped")
def dropped_at_the_resume(about: About, step: str, share: str) -> None:
    run = about.the_run
    assert step_of(step) == run.begins[-1]
    assert_share(share, run.metric("residual_dropped_ratio", [run.begins[-1]]))


@says(rf"([\w -]+) changed between steps {STEP} and {STEP}: {NUMBER} before, {NUMBER} after")
def changed(about: About, title: str, last: str, first: str, before: str, after: str) -> None:
    found = onset_of(about.the_run, KEYS[title.lower()])
    assert found[:2] == (step_of(last), step_of(first))
    assert_shown(before, found[3])
    assert_shown(after, found[4])
    about.changed = KEYS[title.lower()]


@says(rf"{NUMBER} layers? changed, most {LAYER} \({NUMBER} to {NUMBER}\)")
def layers_changed(about: About, count: str, layer: str, before: str, after: str) -> None:
    layers = onset_of(about.the_run, about.changed)[5]
    assert len(layers) == int(count)
    assert layers[0][0] == layer
    assert_shown(before, layers[0][1])
    assert_shown(after, layers[0][2])


@says(rf"{NUMBER} that hardly changed")
def hardly_changed(about: About, count: str) -> None:
    about.announced = int(count)


@says(r"no reported value changed by more than 10 %")
def nothing_changed(about: About) -> None:
    about.unchanged = True


KEYS = {"non-finite weights": "nonfinite_params", "edq": "edq_ratio", "updates lost": "lost_update_ratio"}


@says(rf"{NUMBER} were not finite before, {NUMBER} after")
def not_finite_before(about: About, before: str, after: str) -> None:
    curve = list(about.the_run.curve("nonfinite_params").values())
    assert_shown(before, curve[0])
    assert_shown(after, np.nanmax(curve))


@says(rf"{NUMBER} of {NUMBER} states \({LAYER}, .*\) are not what was saved at step {STEP}")
def states_differ(about: About, count: str, of: str, _layer: str, step: str) -> None:
    run = about.the_run
    assert step_of(step) == run.begins[-1] - 1
    assert int(of) == 3 * len(run.layers), "each layer keeps two moments and the residual"
    assert int(count) == len(run.layers), "the residuals alone were left out"


@says(rf"farthest is {LAYER} \(parameter_low\), by 1 of its norm")
def farthest(about: About, layer: str) -> None:
    assert layer in about.the_run.layers
