"""The questions of docs/fleet.md, and their answers from the API."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from collage_monitor import wire
from tests.server.fleet import FLEET, NAMES

__all__ = ["ANSWERS", "DIALECTS", "QUESTIONS", "same_rows"]

_TEXT = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()
QUESTIONS = re.findall(r"^### \d+\. ([^\n]+)\n.*?```sql\n(.*?)```", _TEXT, re.DOTALL | re.MULTILINE)
"""(question, SQL)."""
_RUNS = {run.run_id: run for run in FLEET}
_EVERY = 10_000


def _dialects():
    """Engine → what of DuckDB's SQL it says otherwise, from the page's table."""
    lines = _TEXT.split("| DuckDB |", 1)[1].splitlines()
    engines = [cell.strip() for cell in lines[0].strip(" |").split("|")]
    rows = [re.findall(r"`([^`]+)`", line) for line in lines[2:] if line.startswith("|")]
    return {engine: [(row[0], row[place + 1]) for row in rows] for place, engine in enumerate(engines)}


DIALECTS = _dialects()


class Numbers:
    """What the server answers of the fleet."""

    def __init__(self, server):
        self._server = server
        query = "&".join(f"run={run.run_id}" for run in FLEET)
        compared = server.get(f"/compare?metric=edq_ratio&{query}", wire.Comparison)
        self.merged = {entry.run_id: entry.merged for entry in compared.runs}

    def series(self, run_id, metric, **query):
        """Step → value."""
        found = self._server.series(metric, run_id, points=_EVERY, **query)
        return dict(zip(found.steps, found.values, strict=True))

    def merged_over(self, run_id, metric, **query):
        """One number of all steps that are asked for."""
        [value] = self._server.series(metric, run_id, points=1, **query).values
        return value


def layers_that_lose_first(api):
    first: dict[tuple[int, str], int] = {}
    runs = defaultdict(set)
    for run in FLEET:
        for layer in NAMES:
            for step, lost in api.series(run.run_id, "lost_update_ratio", layer=layer).items():
                if lost > 0.5:
                    place = (3 * 16 * run.width, layer)
                    first[place] = min(step, first.get(place, step))
                    runs[place].add(run.run_id)
    return sorted(
        [(*place, step, len(runs[place])) for place, step in first.items()], key=lambda r: (r[0], r[2], r[1])
    )


def cost_by_rate(api):
    edqs = defaultdict(list)
    for run in FLEET:
        edqs[run.strategy, run.rate].append(api.merged[run.run_id]["edq_ratio"])
    return [(*place, len(held), min(held), np.mean(held)) for place, held in sorted(edqs.items())]


def stuck(api):
    key = "state_decrement_ratio/exp_avg_sq"
    return [(r, r, api.merged[r][key]) for r in sorted(_RUNS) if api.merged[r][key] < 0.1]


def worst_layers(api):
    rows = []
    for layer in NAMES:
        edqs = [api.merged_over(run.run_id, "edq_ratio", layer=layer) for run in FLEET]
        rows.append((layer, len(edqs), sum(edq < 0.9 for edq in edqs), min(edqs)))
    return sorted(rows, key=lambda row: (row[3], row[0]))


def lost_by_strategy(api):
    totals: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for run in FLEET:
        held = api.merged[run.run_id]
        totals[run.strategy, "bfloat16"] += [held["lost"], held["lost"] + held["distorted"] + held["faithful"]]
    return [(*place, lost / active) for place, (lost, active) in sorted(totals.items())]


def chance(api):
    edqs = defaultdict(list)
    for run in FLEET:
        edqs[run.strategy, 3 * 16 * run.width, run.rate].append(api.merged[run.run_id]["edq_ratio"])
    return [(*p, len(held), max(held) - min(held)) for p, held in sorted(edqs.items()) if len(held) > 1]


def first_losses(api):
    rows = []
    for run_id in sorted(_RUNS):
        steps = [step for step, lost in api.series(run_id, "lost_update_ratio").items() if lost > 0.3]
        rows += [(run_id, min(steps))] if steps else []
    return rows


def shares_of_loss(api):
    rows = []
    for run_id in sorted(_RUNS):
        missing = {}
        for layer in NAMES:
            norm = api.merged_over(run_id, "intended_norm", layer=layer)
            squares = norm**2 * _RUNS[run_id].steps
            missing[layer] = squares * (1 - api.merged_over(run_id, "edq_ratio", layer=layer))
        if sum(missing.values()) > 0:
            rows += [(run_id, layer, missing[layer] / sum(missing.values())) for layer in sorted(NAMES)]
    return rows


def blow_ups(api):
    rows = []
    for run_id in sorted(_RUNS):
        for layer in NAMES:
            counts = {k: n for k, n in api.series(run_id, "nonfinite_grads", layer=layer).items() if n}
            rows += [(run_id, layer, min(counts), sum(counts.values()))] if counts else []
    return rows


def resumes(api):
    rows = []
    for run in FLEET:
        if run.resumed is None:
            continue
        for attempt, first, last in ((1, 1, run.resumed - 1), (2, run.resumed, run.steps)):
            edq = api.merged_over(run.run_id, "edq_ratio", **{"from": first, "to": last})
            rows.append((run.run_id, attempt, first, last, edq))
    return rows


ANSWERS = (
    layers_that_lose_first,
    cost_by_rate,
    stuck,
    worst_layers,
    lost_by_strategy,
    chance,
    first_losses,
    shares_of_loss,
    blow_ups,
    resumes,
)
"""In the order of the page: what the API says, as rows."""


def same_rows(found, expected, what):
    """Rows are equal, numbers to 1e-9."""
    assert expected, what
    assert len(found) == len(expected), (what, found, expected)
    for row, wanted in zip(found, expected, strict=True):
        assert len(row) == len(wanted)
        for value, number in zip(row, wanted, strict=True):
            if isinstance(number, str):
                assert value == number, (what, row, wanted)
            else:
                assert abs(float(value) - number) <= 1e-9 * max(abs(number), 1e-3), (what, row, wanted)
