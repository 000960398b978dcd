"""The numbers of cards and tables, each recomputed by the head of its column or the name of its row."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from collage_monitor.metrics import METRICS, SCALARS
from tests.facts.clauses import About, assert_share, assert_shown, check_text, is_shown, onset_of, step_of
from tests.facts.raw import RawRun
from tests.facts.reading import Card, Table

SPAN_POINTS = 16
"""Points on each side of a change that are merged."""
LAST = 20
"""Logged values that a mean in the table is over."""
TITLES = {entry.title: name for name, entry in METRICS.items()} | {e.title: name for name, e in SCALARS.items()}
VALUES = re.compile(r"(?:[<>] )?[−-]?\d[\d.,]*(?:e[−+-]?\d+)?(?: %| or (?:more|less))?|–|NaN")
"""The numbers of a cell, in the forms that pages have."""
SHARES = tuple(entry.title for entry in METRICS.values() if entry.unit == "share")


def key_of(title: str) -> str:
    """'State decrement, exp_avg' → its metric's key."""
    name, _, label = title.partition(", ")
    return f"{TITLES[name]}/{label}" if label and title not in TITLES else TITLES[title]


def check_card(about: About, card: Card) -> None:
    """Each line of a card: a run's number with its interval or step, and what stands below."""
    for line in card.lines:
        named = next(
            (name for name in sorted(about.runs, key=len, reverse=True) if line.startswith(f"{name} ")), None
        )
        run, told = (about.runs[named], line.removeprefix(named).strip()) if named else (about.run, line)
        if told.startswith(("over", "at step")):
            check_text(about, told)
            newest = told.partition("newest step ")[2]
            if newest and run is not None:
                assert_shown(newest, run.metric(card.metric, run.steps[-1:]), f"newest {card.metric}")
        elif told[:1].isdigit() or told[:1] in "–−<>N":
            assert run is not None
            check_number(run, card.metric, told)


def check_number(run: RawRun, key: str, told: str) -> None:
    """'0.976 0.973 … 0.979' over the recent past, or '5.03 at step 96'."""
    if key in SCALARS:
        value, _, step = told.replace("at step", "step").partition(" step ")
        assert_shown(value, run.newest(key)[1], key)
        assert not step or step_of(step) == run.newest(key)[0]
        return
    value, *bounds = VALUES.findall(told)
    true = run.metric(key, run.recent)
    assert_shown(value, true, f"{key} of {run.created.name}")
    if len(bounds) == 2 and not is_shown(bounds[0], true) and not is_shown(bounds[1], true):
        low, high = (float(re.sub("[<>,% ]", "", bound).replace("\u2212", "-")) for bound in bounds)
        assert (0 if "<" in bounds[0] else low) < (100 * true if "%" in told else true) < high


Cell = Callable[[RawRun, str], None]


def _metric(key: str) -> Cell:
    return lambda run, told: check_number(run, key, told)


def _mean_of_last(name: str) -> Cell:
    def check(run: RawRun, told: str) -> None:
        if " step " in told:
            check_number(run, name, told)
        else:
            assert_shown(told, _last_mean(run, name), f"{name} of {run.created.name}")

    return check


def _steps(run: RawRun, told: str) -> None:
    assert_shown(told.split(" ")[0], run.last_step)


def _state(run: RawRun, told: str) -> None:
    value, _, state = told.partition(" ")
    check_number(run, f"state_decrement_ratio/{state or 'exp_avg_sq'}", value)


def _scalar(name: str) -> Cell:
    return lambda run, told: assert_shown(told.split(" ")[0], run.newest(name)[1], name)


OF_RUNS: dict[str, Cell] = {
    "Steps": _steps,
    "Validation loss": _metric("validation_loss"),
    "Training loss": _mean_of_last("loss"),
    "EDQ": _metric("edq_ratio"),
    "Oracle EDQ": _metric("edq_oracle_ratio"),
    "State decrement": _state,
    "Updates lost": _metric("lost_update_ratio"),
    "Bytes per parameter": _scalar("bytes_per_parameter"),
    "Tokens/s": _scalar("tokens_per_second"),
}
"""Columns of the table of compared runs."""


def check_table(about: About, table: Table) -> None:
    """Each cell of a table, by what its first head says the rows are."""
    first = table.heads[0] if table.heads else None
    if first in {"Layers that lose the most", "Layer"}:
        _check_worst(about, table)
    elif first == "Run":
        _check_runs(about, table)
    elif first == "Strategy":
        _check_strategies(about, table)
    elif first == "" and table.heads[-1] == "Change":
        _check_before_and_after(about, table)
    elif first == "When":
        for _, step, what in table.rows:
            assert step == "–" or 1 <= step_of(step) <= about.the_run.last_step
            check_text(
                about,
                re.sub(r"^(Attempt|Resumed|Lost at a resume|Compared with what was saved|Alert fires) ", "", what),
            )
    elif first == "Alert":
        for cells in table.rows:
            about.run = about.runs[cells[1]]
            check_text(about, cells[-1])
    elif table.heads[1:] == ("Before", "After"):
        _check_changed(about, table)
    else:
        assert first is None, f"no recomputation of a table of {table.heads}"
        _check_facts(about, table)


def _check_worst(about: About, table: Table) -> None:
    run, steps = about.the_run, about.the_run.recent
    order = sorted(run.layers, key=lambda layer: -run.missing(layer, steps))
    for place, (layer, share, edq, lost) in enumerate(table.rows):
        assert run.missing(layer, steps) == run.missing(order[place], steps), f"{layer} is not number {place + 1}"
        assert_share(share.removesuffix(" %"), run.share_of_loss(layer, steps), layer)
        assert_shown(edq, run.metric("edq_ratio", steps, [layer]), layer)
        assert_shown(lost, run.metric("lost_update_ratio", steps, [layer]), layer)


def _check_runs(about: About, table: Table) -> None:
    for cells in table.rows:
        about.run = about.runs[cells[0]]
        for head, told in zip(table.heads[1:], cells[1:], strict=True):
            if head == "Strategy":
                assert about.the_run in about.strategies[told].runs
            elif head in {"What is said of it", "Judgement"}:
                check_text(about, told)
            elif head == "Verdict":
                assert told.endswith("healthy") == (about.the_run.created.name not in about.sick)
            elif head == "Over":
                check_text(about, f"over {told}")
            elif head != "State":
                OF_RUNS[head](about.the_run, told)


def _check_strategies(about: About, table: Table) -> None:
    for title, health, *cells in table.rows:
        name, _, count = title.removesuffix(" runs)").partition(" (")
        group, reference = about.strategies[name], about.strategies["Plain · float32"]
        assert not count or int(count) == len(group.runs)
        assert health.startswith("healthy") == group.is_healthy
        for head, told in zip(table.heads[2:], cells, strict=True):
            value = told.partition(" ")[0]
            if head == "Loss gap":
                if value not in {"reference", "–"}:
                    assert_shown(value, group.gap(reference)[0], f"gap of {name}")
            elif head == "Loss":
                # Until the curves are there no loss is known of runs that ended at different steps.
                assert value == "–" or is_shown(value, group.loss_of()), f"loss of {name}: {value}"
            elif head == "Bytes per parameter":
                assert_shown(value, group.mean_of("bytes_per_parameter"))
            elif head == "Tokens/s":
                assert_shown(value, group.mean_of("tokens_per_second"), name)
            else:
                key = "state_decrement_ratio/exp_avg_sq" if head == "State decrement" else TITLES[head]
                found = [run.metric(key, run.recent) for run in group.counted]
                assert_shown(told.partition(" ±")[0], float(np.mean(found)), f"{head} of {name}")


def _last_mean(run: RawRun, name: str) -> float:
    logged = run.scalars[name]
    return float(np.mean([logged[step] for step in sorted(logged)[-LAST:]]))


def _check_before_and_after(about: About, table: Table) -> None:
    run = about.the_run
    found = [re.findall(r"[\d,]+\d|\d", head) for head in table.heads[1:3]]
    spans = [(step_of(steps[0]), step_of(steps[-1])) if steps else (0, -1) for steps in found]
    _check_picked(about, spans) if about.picked else _check_spans(about, spans)
    assert about.announced in {None, len(table.rows)}
    steps = [[at for at in run.steps if first <= at <= last] for first, last in spans]
    for title, *told, change in table.rows:
        values = [_value_over(run, title, own, span) for own, span in zip(steps, spans, strict=True)]
        for text, value in zip(told, values, strict=True):
            if text not in {"not reported", "–"}:
                assert_shown(text.removesuffix(" of 1"), value, f"{title} over {spans}")
        _check_change(title, change, *values)
        assert not (about.unchanged and change), title


def _check_spans(about: About, spans: Sequence[tuple[int, ...]]) -> None:
    """16 points on each side of the change or the resume; what lasts a moment is alone."""
    run = about.the_run
    last_before, first_after = (run.begins[-1] - 1, run.begins[-1]) if len(run.begins) > 1 else (0, 0)
    if about.changed:
        _, _, settled, *_ = found = onset_of(run, about.changed)
        last_before, first_after = found[0], settled
    before = [step for step in run.steps if step <= last_before][-SPAN_POINTS:]
    assert spans[0] == (before[0], before[-1])
    after = [step for step in run.steps if step >= first_after][:SPAN_POINTS]
    assert spans[1][0] == after[0]
    assert spans[1][1] in {after[0], after[-1]}


def _check_picked(about: About, spans: Sequence[tuple[int, ...]]) -> None:
    """16 points on each side of a step; a range, and as many steps before it."""
    assert about.picked
    (first, last), steps = about.picked, about.the_run.steps
    wanted = [step for step in steps if step < first][-SPAN_POINTS:], [s for s in steps if s >= first][:SPAN_POINTS]
    if first < last:
        length = last - first + 1
        wanted = [max(first - length, 0), max(first - 1, 0)], [first, last]
    assert spans == [(own[0], own[-1]) if own else (0, -1) for own in wanted]


def _value_over(run: RawRun, title: str, steps: Sequence[int], span: tuple[int, ...]) -> float:
    if span[1] < span[0]:
        return float("nan")
    if title == "Attempts begun":
        return float(sum(begin <= span[1] for begin in run.begins))
    if title == "Ranks that reported":
        return 1.0
    key = key_of(title)
    if key not in SCALARS:
        return run.metric(key, steps) if steps else float("nan")
    logged = [value for step, value in sorted(run.scalars.get(key, {}).items()) if span[0] <= step <= span[1]]
    whole = key in {"tokens", "oracle_restarts", "external_writes"}
    return float("nan") if not logged else max(logged) if whole else float(np.mean(logged))


def _check_change(title: str, change: str, before: float, after: float) -> None:
    if not change:
        hardly = max(0.1 * abs(before), 1e-4 * title.startswith(SHARES)) * (1 + 1e-9)
        assert title in {"Oracle steps", "Tokens"} or not abs(after - before) > hardly, (title, before, after)
        return
    sign, _, size = change.partition(" ")
    if sign == "×":
        assert_shown(size, after / before, title)
    else:
        assert (after > before) == (sign == "+"), title
        true = abs(after - before)
        assert is_shown(size, true) or float(size.replace(",", "")) == float(f"{true:.3g}"), (title, change, true)


def _check_changed(about: About, table: Table) -> None:
    layers = {name: (before, after) for name, before, after in onset_of(about.the_run, about.changed)[5]}
    for layer, before, after in table.rows:
        assert_shown(before, layers[layer][0], layer)
        assert_shown(after, layers[layer][1], layer)


def _check_facts(about: About, table: Table) -> None:
    """Name and number: a metric over the recent past, a logged scalar, or what the agent said of itself."""
    run = about.the_run
    said = {
        "Seed": "–" if run.created.seed is None else str(run.created.seed),
        "Run": run.run_id,
        "Project": run.project,
        "Parameters": f"{sum(run.sizes.values()):,} in {run.watch.dtype}",
        "Measured": f"every {run.watch.every} steps, {run.watch.sample:,} elements a tensor",
    }
    for name, told in table.rows:
        if name in said:
            assert told == said[name], name
        elif name.startswith("Attempt "):
            assert told.startswith(f"from step {run.begins[int(name.split()[1]) - 1]}, ")
        elif name in run.scalars:
            check_scalar(run, name, told)
        elif name == "Lost at the resume":
            check_text(about, told)
        elif name in TITLES or name.partition(", ")[0] in TITLES:
            key = key_of(name)
            check_scalar(run, key, told) if key in run.scalars else check_number(run, key, told)


def check_scalar(run: RawRun, name: str, told: str) -> None:
    """'5.043 at step 96'."""
    value, _, step = told.partition(" at step ")
    assert_shown(value, run.newest(name)[1], name)
    assert step_of(step) == run.newest(name)[0]
