"""A server in memory: the read routes answered from generated runs, through the real client and codec."""

import json
from collections import Counter

import httpx
import msgspec
import numpy as np

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.diagnosis import GRAVITY, Evidence, judge
from collage_monitor.metrics import HISTOGRAM_LABELS, METRICS, split_key
from collage_monitor.statistics import finish_all, histogram_counts, merge_steps
from tests.dashboard.figures.answers import histogram_answer, series

SCALES = {"step": 1.0, "tokens": 2048.0, "time": 0.5}


class FakeServer:
    """Answers for `runs`; `refuse_with` (status, code) makes every answer an error, `down` makes none come."""

    def __init__(self, runs=()):
        self.runs = {run.run_id: run for run in runs}
        self.refuse_with = None
        self.down = False
        self.events: list[wire.Event] = []
        self.worst: list[wire.LayerLoss] = []
        self.archived: set[str] = set()
        self.before_heatmap = lambda: None
        self.asked = []

    def client(self):
        """A read client whose network is this object."""
        return Client("http://127.0.0.1:7420", transport=httpx.MockTransport(self._answer))

    def _answer(self, request):
        self.asked.append(str(request.url))
        if self.down:
            raise httpx.ConnectError("connection refused", request=request)
        if self.refuse_with:
            return _error(*self.refuse_with)
        parts = request.url.path.removeprefix("/api/v1/").split("/")
        query = request.url.params
        if parts == ["run-table"]:
            return _json(self._table(query))
        if parts == ["run-filters"]:
            others: dict = {name: {} for name in ("strategy", "group", "tag", "health")}
            return _json(wire.RunFilters(project={"demo": len(self.runs)}, **others))
        if parts == ["events"]:
            return _json(wire.IncidentPage(events=[]))
        if parts == ["compare"]:
            return self._compare(query)
        run = self.runs.get(parts[1])
        if run is None:
            return _error(404, "run_not_found")
        return self._run_route(run, parts[2] if len(parts) > 2 else "", query)

    def _run_route(self, run, route, query):
        if route == "":
            return _json(self._run(run))
        if route == "overview":
            return _json(self._overview(run))
        if route == "layers":
            return _json(wire.LayerList(run_id=run.run_id, layers=run.layers))
        if route == "series":
            return _json(self._all_series(run, query.get_list("metric"), query.get("layer"), query))
        if route == "heatmap":
            self.before_heatmap()
            most = int(query.get("points", 1))
            return _json(self._heatmap(run, query["metric"], query.get("order"), most, query.get("axis", "step")))
        if route == "histogram":
            return _json(self._histogram(run, query.get("layer"), query.get("step")))
        if route == "events":
            return _json(self._event_page(run, query))
        return _error(404, "no_such_route")

    def _event_page(self, run, query):
        after, until, limit = int(query["cursor"]), float(query.get("until", "inf")), int(query["limit"])
        asked = [event for event in self.events if event.event > after and event.time <= until]
        found = asked[-limit:] if "newest" in query else asked[:limit]
        cursor = found[-1].event if found else after
        return wire.EventPage(run_id=run.run_id, events=found, cursor=cursor, left_out=len(asked) - len(found))

    def _table(self, query):
        chosen = query.get_list("run_id") or list(self.runs)
        found = [run for run_id in chosen if (run := self.runs.get(run_id)) and query.get("q", "") in run.name]
        found = [run for run in found if query.get("state") in (None, run.state)]
        if "tag != archived" in query.get_list("where"):
            found = [run for run in found if run.run_id not in self.archived]
        if query.get("tag") == "archived":
            found = [run for run in found if run.run_id in self.archived]
        live = sum(run.state == "running" for run in found)
        start = int(query.get("offset", 0))
        rows = [self._row(run) for run in found[start : start + int(query["limit"])]]
        said = {run.run_id: self._overview(run) for run in found}
        healths = Counter(entry.health for entry in said.values())
        order = [*GRAVITY, "healthy", "unknown"]
        worst = min(found, key=lambda run: order.index(said[run.run_id].health), default=None)
        told = None
        if worst is not None and said[worst.run_id].health in GRAVITY:
            told = wire.WorstRun(run_id=worst.run_id, name=worst.name, short=said[worst.run_id].short)
        seen = [(run.run_id, run.state, self._run(run).updated_at, said[run.run_id].last_step) for run in found]
        counts = {"total": len(found), "live": {"healthy": live} if live else {}, "healths": dict(healths)}
        return wire.RunTable(rows=rows, worst=told, revision=str(seen), **counts)

    def _row(self, run):
        whole = self._run(run)
        stored = {name: getattr(whole, name) for name in wire.RunRow.__struct_fields__ if hasattr(whole, name)}
        watch = whole.watch
        declared = {"strategy": watch.strategy, "observed_strategy": watch.observed_strategy, "dtype": watch.dtype}
        return wire.RunRow(**stored, **declared, overview=self._overview(run))

    def _overview(self, run):
        if not run.measured:
            return wire.Overview(run_id=run.run_id)
        numbers = {key: _number(value) for key, value in self._merged(run).items()}
        evidence = Evidence(numbers, watch=run.watch(), first_step=run.measured[0], last_step=run.measured[-1])
        return wire.Overview(
            **msgspec.structs.asdict(judge(evidence)),
            run_id=run.run_id,
            measured_steps=len(run.measured),
            numbers=numbers,
            worst=self.worst,
        )

    def _totals(self, run, step, layer):
        if layer is None:
            return _kept(run, ("model", step), lambda: run.model_totals(step))
        place = [entry.name for entry in run.layers].index(layer)
        return {key: values[place] for key, values in run.totals(step).items()}

    def _finished(self, run, step, layer):
        return _kept(run, ("point", step, layer), lambda: finish_all(self._totals(run, step, layer)))

    def _merged(self, run):
        def merge():
            return finish_all(merge_steps([self._totals(run, step, None) for step in run.measured]))

        return _kept(run, ("merged",), merge)

    def _columns(self, run, size):
        """Of each `size` measured steps: their steps, and what they come to, metric → value [layer]."""
        merged = [run.measured[at : at + size] for at in range(0, len(run.measured), size)]
        return [(steps, finish_all(merge_steps([run.totals(step) for step in steps]))) for steps in merged]

    def _all_series(self, run, metrics, layer, asked):
        """The first metric's, with those of the others."""
        first, *others = metrics
        more = {other: self._series(run, other, layer, asked) for other in others}
        return msgspec.structs.replace(self._series(run, first, layer, asked), **({"more": more} if more else {}))

    def _series(self, run, metric, layer, asked):
        axis = asked.get("axis", "step")
        first, last, most = (int(asked.get(name, 10**9)) for name in ("from", "to", "points"))
        measured = [step for step in run.measured if first % 10**9 <= step <= last]
        if split_key(metric)[0] in METRICS:
            steps = measured
            points = [self._finished(run, step, layer) for step in steps]
            values = [_number(point.get(metric, np.nan)) for point in points]
            bounds = {
                name: [_number(point[f"{metric}_{name}"]) for point in points]
                for name in ("low", "high")
                if points and f"{metric}_{name}" in points[0]
            }
        else:
            steps = [step for step in measured if metric in run.scalars(step)]
            values, bounds = [run.scalars(step)[metric] for step in steps], {}
        if len(steps) > most:
            # Thinned as a server does: a point is the mean of several steps, under the last one's label.
            size = -(-len(steps) // most)
            places = range(0, len(steps), size)
            values = [float(np.mean(values[at : at + size])) for at in places]
            firsts, steps, bounds = steps[::size], [steps[min(at + size, len(steps)) - 1] for at in places], {}
        else:
            firsts = steps
        told = {"run_id": run.run_id, "steps": steps, "first_steps": firsts, "axis": axis, "layer": layer, **bounds}
        positions = [step * SCALES[axis] for step in steps]
        return series(values, metric, positions=positions, ranks=[1] * len(steps), **told)

    def _heatmap(self, run, metric, order, most, axis):
        size = -(-len(run.measured) // most) if most > 1 else 1
        columns = _kept(run, ("columns", size), lambda: self._columns(run, size))
        rows = np.stack([found[metric] for _, found in columns], axis=1)
        places = np.argsort(rows[:, -1]) if order == "worst" else np.arange(len(rows))
        return wire.Heatmap(
            run_id=run.run_id,
            metric=metric,
            layers=[run.layers[place].name for place in places],
            first_steps=[steps[0] for steps, _ in columns],
            steps=[steps[-1] for steps, _ in columns],
            values=[[_number(value) for value in rows[place]] for place in places],
            axis=axis,
            positions=[steps[-1] * SCALES[axis] for steps, _ in columns] if axis != "step" else [],
        )

    def _histogram(self, run, layer, step):
        steps = [int(step)] if step else run.measured
        counts = np.sum([histogram_counts(self._totals(run, at, layer)) for at in steps], axis=0)
        found = dict(zip(HISTOGRAM_LABELS, counts, strict=True))
        return histogram_answer(found, run_id=run.run_id, layer=layer, first_step=steps[0], step=steps[-1])

    def _compare(self, query):
        axis = query.get("axis", "step")
        compared = []
        for run_id in query.get_list("run"):
            if run_id not in self.runs:
                return _error(404, "run_not_found")
            run = self.runs[run_id]
            compared.append(
                wire.ComparedRun(
                    run_id=run.run_id,
                    name=run.name,
                    strategy=run.strategy,
                    dtype=run.dtype,
                    state=run.state,
                    last_step=run.steps,
                    reports=len(run.measured),
                    series=self._all_series(run, query.get_list("metric"), None, {"axis": axis}),
                    merged={key: _number(value) for key, value in self._merged(run).items()},
                    scalars=_last_scalars(run),
                    mean_scalars={name: entry.value for name, entry in _last_scalars(run).items()},
                )
            )
        return _json(wire.Comparison(metric=query["metric"], axis=axis, runs=compared))

    def _run(self, run):
        newest = self._finished(run, run.measured[-1], None) if run.measured else {}
        begun = {"run_id": run.run_id, "first_step": 1, "created_at": 1.7e9}
        return wire.Run(
            **begun,
            project="demo",
            name=run.name,
            group=None,
            tags=["test"],
            notes="",
            seed=1,
            config={"learning_rate": 2e-4},
            state=run.state,
            updated_at=1.7e9 + run.steps,
            last_step=run.steps,
            attempts=[wire.Attempt(attempt=1, launch_id="launch-1", measured_from=1, **begun)],
            watch=run.watch(),
            latest={key: _number(value) for key, value in newest.items()},
            scalars=_last_scalars(run),
        )


def _kept(run, key, make):
    """What `make` gives, made once of a run of this length: the same runs are asked in many tests."""
    kept, key = run.__dict__.setdefault("kept", {}), (run.steps, *key)
    if key not in kept:
        kept[key] = make()
    return kept[key]


def _last_scalars(run):
    scalars: dict = {}
    for step in run.measured:
        scalars |= {name: wire.LoggedScalar(step=step, value=value) for name, value in run.scalars(step).items()}
    return scalars


def _number(value):
    return None if np.isnan(value) else wire.to_number(float(value))


def _json(answer):
    return httpx.Response(200, content=wire.encode_json(answer))


def _error(status, code):
    body = {"error": {"code": code, "message": f"{code} in a test", "field": "run", "limit": None}}
    return httpx.Response(status, content=json.dumps(body))
