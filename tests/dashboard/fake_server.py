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
        route, *of = request.url.path.removeprefix("/api/v1/").split("/")
        query = request.url.params
        if route == "compare":
            return self._compare(query)
        if route == "run-table":
            return _json(self._table(query))
        if route == "run-filters":
            others: dict = {name: {} for name in ("strategy", "group", "tag", "health")}
            return _json(wire.RunFilters(project={"demo": len(self.runs)}, **others))
        if route == "events":
            return _json(wire.IncidentPage(events=[]))
        run_id, *asked = of
        if run_id not in self.runs:
            return _error(404, "run_not_found")
        routes = {"overview": self._overview, "layers": self._layers, "series": self._all_series}
        routes |= {"heatmap": self._heatmap, "histogram": self._histogram, "events": self._event_page}
        return _json((routes[asked[0]] if asked else self._run)(self.runs[run_id], query))

    def _layers(self, run, query):
        return wire.LayerList(run_id=run.run_id, layers=run.layers)

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
        counts: dict = {"total": len(found), "live": {"healthy": live} if live else {}, "healths": dict(healths)}
        return wire.RunTable(rows=rows, worst=told, revision=str(seen), **counts)

    def _row(self, run):
        whole = self._run(run)
        stored = {name: getattr(whole, name) for name in wire.RunRow.__struct_fields__ if hasattr(whole, name)}
        watch = whole.watch
        declared = {"strategy": watch.strategy, "observed_strategy": watch.observed_strategy, "dtype": watch.dtype}
        return wire.RunRow(**stored, **declared, overview=self._overview(run))

    def _overview(self, run, query=None):
        if not run.measured:
            return wire.Overview(run_id=run.run_id)
        numbers = self._merged(run)
        evidence = Evidence(numbers, watch=run.watch(), first_step=run.measured[0], last_step=run.measured[-1])
        told = msgspec.structs.asdict(judge(evidence)) | {"numbers": numbers, "worst": self.worst}
        return wire.Overview(run_id=run.run_id, measured_steps=len(run.measured), **told)

    def _totals(self, run, step, layer):
        if layer is None:
            return _kept(run, ("model", step), lambda: run.model_totals(step))
        place = [entry.name for entry in run.layers].index(layer)
        return {key: values[place] for key, values in run.totals(step).items()}

    def _finished(self, run, step, layer):
        return _kept(run, ("point", step, layer), lambda: finish_all(self._totals(run, step, layer)))

    def _merged(self, run):
        def merge():
            return _numbers(finish_all(merge_steps([self._totals(run, step, None) for step in run.measured])))

        return _kept(run, ("merged",), merge)

    def _columns(self, run, size):
        """Of each `size` measured steps: their steps, and what they come to, metric → value [layer]."""
        merged = [run.measured[at : at + size] for at in range(0, len(run.measured), size)]
        return [(steps, finish_all(merge_steps([run.totals(step) for step in steps]))) for steps in merged]

    def _all_series(self, run, query):
        """The first metric's, with those of the others."""
        first, *others = (self._series(run, metric, query) for metric in query.get_list("metric"))
        return msgspec.structs.replace(first, more={other.metric: other for other in others}) if others else first

    def _series(self, run, metric, asked):
        axis, layer = asked.get("axis", "step"), asked.get("layer")
        first, last, most = (int(asked.get(name, 10**9)) for name in ("from", "to", "points"))
        measured = [step for step in run.measured if first % 10**9 <= step <= last]
        if split_key(metric)[0] in METRICS:
            steps = measured
            points = [_numbers(self._finished(run, step, layer)) for step in steps]
            values = [point.get(metric) for point in points]
            known = [name for name in ("low", "high") if points and f"{metric}_{name}" in points[0]]
            bounds = {name: [point[f"{metric}_{name}"] for point in points] for name in known}
        else:
            steps = [step for step in measured if metric in run.scalars(step)]
            values, bounds = [run.scalars(step)[metric] for step in steps], {}
        firsts = steps
        if len(steps) > most:
            # Thinned as a server does: a point is the mean of several steps, under the last one's label.
            size = -(-len(steps) // most)
            places = range(0, len(steps), size)
            values, bounds = [float(np.mean(values[at : at + size])) for at in places], {}
            firsts, steps = steps[::size], [steps[min(at + size, len(steps)) - 1] for at in places]
        told = {"run_id": run.run_id, "steps": steps, "first_steps": firsts, "axis": axis, "layer": layer, **bounds}
        positions = [step * SCALES[axis] for step in steps]
        return series(values, metric, positions=positions, ranks=[1] * len(steps), **told)

    def _heatmap(self, run, query):
        self.before_heatmap()
        metric, axis, most = query["metric"], query.get("axis", "step"), int(query.get("points", 1))
        size = -(-len(run.measured) // most) if most > 1 else 1
        columns = _kept(run, ("columns", size), lambda: self._columns(run, size))
        rows = np.stack([found[metric] for _, found in columns], axis=1)
        places = np.argsort(rows[:, -1]) if query.get("order") == "worst" else np.arange(len(rows))
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

    def _histogram(self, run, query):
        layer, steps = query.get("layer"), [int(query["step"])] if "step" in query else run.measured
        counts = np.sum([histogram_counts(self._totals(run, at, layer)) for at in steps], axis=0)
        found = dict(zip(HISTOGRAM_LABELS, counts, strict=True))
        return histogram_answer(found, run_id=run.run_id, layer=layer, first_step=steps[0], step=steps[-1])

    def _compare(self, query):
        asked = query.get_list("run")
        if not set(asked) <= set(self.runs):
            return _error(404, "run_not_found")
        runs = [self._compared(self.runs[run_id], query.remove("points")) for run_id in asked]
        return _json(wire.Comparison(metric=query["metric"], axis=query.get("axis", "step"), runs=runs))

    def _compared(self, run, query):
        own = {name: getattr(run, name) for name in ("run_id", "name", "strategy", "dtype", "state")}
        return wire.ComparedRun(
            **own,
            last_step=run.steps,
            reports=len(run.measured),
            series=self._all_series(run, query),
            merged=self._merged(run),
            scalars=_last_scalars(run),
            mean_scalars={name: entry.value for name, entry in _last_scalars(run).items()},
        )

    def _run(self, run, query=None):
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
            latest=_numbers(newest),
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


def _numbers(named):
    return {key: _number(value) for key, value in named.items()}


def _json(answer):
    return httpx.Response(200, content=wire.encode_json(answer))


def _error(status, code):
    body = {"error": {"code": code, "message": f"{code} in a test", "field": "run", "limit": None}}
    return httpx.Response(status, content=json.dumps(body))
