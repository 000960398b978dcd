"""The HTTP client of dashboard, command line, notebooks and `alert_listener.py`. Needs the extra `client` (httpx).

A method for each question or change that one of them needs; other routes (sign-in, audit log, silences) go by
`Connection.send`. Messages are `wire`'s, errors `connection.py`'s, and requests, too, but for the stream of
`export`. Incidents are the route `/events`. `frame`, `runs_frame` and `layers_frame` make tables of answers. Names
and arguments are public: `docs/api/client.md` (`tests/docs/test_api.py`, `tests/contract/test_client.py`,
`tests/server/test_frame.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import httpx

from collage_monitor import wire
from collage_monitor.connection import Connection, quoted
from collage_monitor.data_frames import load_pyarrow, plain_number, run_columns, table_of
from collage_monitor.errors import CollageError, ServerUnreachable
from collage_monitor.refusals import refusal

__all__ = ["Axis", "Client", "ExportFormat", "ExportStream"]

_ROWS_A_PAGE: Final = 500
_OF_LAYER: Final = ("shape", "dtype", "elements", "module_type")
Axis = Literal["step", "tokens", "time"]
ExportFormat = Literal["jsonl", "csv", "parquet"]


def _warn_of(damaged: Sequence[wire.DamagedRun]) -> None:
    for run in damaged:
        warnings.warn(f"left out: {run.message}", stacklevel=3)


@dataclass(frozen=True, eq=False)
class ExportStream:
    """A streamed export: its bytes, and the number of lines in all if the format has lines."""

    parts: Iterator[bytes]
    lines: int | None


class Client(Connection):
    """A method for each question to a Collage Monitor server; see `Connection` for what all of them raise."""

    def runs(
        self,
        *,
        project: str | None = None,
        strategy: str | None = None,
        group: str | None = None,
        tag: str | None = None,
        state: str | None = None,
        q: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.RunPage:
        """A page of runs, newest first; `q` searches names, ids, projects, groups, tags and notes."""
        filters = {"project": project, "strategy": strategy, "group": group, "tag": tag, "state": state, "q": q}
        return self.get("/runs", wire.RunPage, {**filters, "cursor": cursor, "limit": limit})

    def all_runs(self, **filters: Any) -> Iterable[wire.Run]:
        """Every run that matches the filters of `runs`, page by page, without damaged ones, with a warning."""
        cursor: str | None = None
        while True:
            page = self.runs(**filters, cursor=cursor)
            yield from page.runs
            _warn_of(page.damaged)
            cursor = page.cursor
            if cursor is None:
                return

    def run(self, run_id: str) -> wire.Run:
        """The facts about a run: labels, state, configuration, newest numbers."""
        return self.get(f"/runs/{quoted(run_id)}", wire.Run)

    def run_table(
        self,
        *,
        run_ids: Sequence[str] | None = None,
        sort: str = "updated_at",
        descending: bool = True,
        offset: int = 0,
        limit: int = 50,
        config: Sequence[str] = (),
        differing: bool = False,
        where: Sequence[str] = (),
        **filters: Any,
    ) -> wire.RunTable:
        """Rows of the table of runs; `filters` are project, strategy, group, tag, state, health and q.

        config: entries of the configuration, by path, that the rows hold; differing: those in which they differ.
        where: conditions that all hold, on columns and entries: ["lr > 1e-3", "edq < 0.9", "age < 2d", "tag = a"].
        """
        order = {"sort": sort, "descending": str(descending).lower(), "offset": offset, "limit": limit}
        chosen: dict[str, Any] = {} if run_ids is None else {"run_id": list(run_ids)}
        chosen |= {"config": list(config)} if config else {}
        chosen |= {"where": list(where)} if where else {}
        chosen |= {"differing": "true"} if differing else {}
        return self.get("/run-table", wire.RunTable, {**filters, **order, **chosen})

    def run_groups(
        self,
        by: wire.GroupBy,
        *,
        opened: Sequence[str] = (),
        sort: str = "updated_at",
        descending: bool = True,
        offset: int = 0,
        limit: int = 50,
        config: Sequence[str] = (),
        where: Sequence[str] = (),
        **filters: Any,
    ) -> wire.RunGroups:
        """Rows of the table of runs in groups: each group, and after an opened one (its `key`) its runs."""
        order = {"sort": sort, "descending": str(descending).lower(), "offset": offset, "limit": limit}
        more = {"open": list(opened), "config": list(config), "where": list(where)}
        return self.get("/run-groups", wire.RunGroups, {**filters, **order, "by": by, **more})

    def run_filters(self) -> wire.RunFilters:
        """The values by which the table of runs can be filtered."""
        return self.get("/run-filters", wire.RunFilters)

    def views(self, project: str | None = None) -> list[wire.SavedView]:
        """Saved views of the table of runs, of one project or of all."""
        return self.get("/views", wire.SavedViewList, {"project": project}).views

    def save_view(self, project: str, create: wire.SavedViewCreate) -> wire.SavedView:
        """Save a view of the table of runs, in place of the project's of this name."""
        return self.post(f"/projects/{quoted(project)}/views", create, wire.SavedView)

    def delete_view(self, project: str, name: str) -> list[wire.SavedView]:
        """Delete a saved view; returns the project's remaining ones."""
        path = f"/projects/{quoted(project)}/views"
        return self.send("DELETE", path, wire.SavedViewList, query={"name": name}).views

    def overview(self, run_id: str, *, fresh: bool = False) -> wire.Overview:
        """The overview of a run: headline, verdict, and the numbers behind them; fresh: evaluated now, with every
        metric of the model, otherwise it may be some seconds old."""
        return self.get(f"/runs/{quoted(run_id)}/overview", wire.Overview, {"fresh": fresh or None})

    def layers(self, run_id: str) -> wire.LayerList:
        """The run's layers."""
        return self.get(f"/runs/{quoted(run_id)}/layers", wire.LayerList)

    def streams(self, run_id: str) -> wire.StreamList:
        """The run's streams, with the number of stored reports of each."""
        return self.get(f"/runs/{quoted(run_id)}/streams", wire.StreamList)

    def latest(self, run_id: str) -> wire.Latest:
        """The newest measured step of a run."""
        return self.get(f"/runs/{quoted(run_id)}/latest", wire.Latest)

    def worst(
        self,
        run_id: str,
        *,
        metric: str = "edq_ratio",
        k: int = 10,
        pattern: str | None = None,
        module_type: str | None = None,
        step: int | None = None,
    ) -> list[wire.WorstLayer]:
        """The k layers worst in `metric` at the newest measured step, or at the one at or before `step`."""
        query = {"metric": metric, "k": k, "pattern": pattern, "module_type": module_type, "step": step}
        return self.get(f"/runs/{quoted(run_id)}/worst", list[wire.WorstLayer], query)

    def series(
        self,
        run_id: str,
        metric: str | Sequence[str],
        *,
        layer: str | None = None,
        pattern: str | None = None,
        module_type: str | None = None,
        points: int = 1000,
        axis: Axis = "step",
        rank: int | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
        cursor: str | None = None,
    ) -> wire.Series:
        """A metric or logged scalar over the run: of a layer, of layers by glob or module type, or of the model.

        With several metrics the first is the answer, and the others are in its `more`. `cursor` follows a single
        one: empty at first, then that of the last answer.
        """
        chosen = _chosen(layer, pattern, module_type, rank, first_step, last_step)
        query = {"metric": _several(metric), "points": points, "axis": axis, "cursor": cursor, **chosen}
        return self.get(f"/runs/{quoted(run_id)}/series", wire.Series, query)

    def heatmap(
        self,
        run_id: str,
        metric: str,
        *,
        points: int = 200,
        order: Literal["depth", "worst"] = "depth",
        pattern: str | None = None,
        module_type: str | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
        axis: Axis = "step",
    ) -> wire.Heatmap:
        """A metric over layers (of a glob, of one module type, or all) and steps."""
        chosen = _chosen(None, pattern, module_type, None, first_step, last_step)
        query = {"metric": metric, "points": points, "order": order, "axis": axis, **chosen}
        return self.get(f"/runs/{quoted(run_id)}/heatmap", wire.Heatmap, query)

    def histogram(
        self,
        run_id: str,
        *,
        name: str = "update_ulp_histogram",
        layer: str | None = None,
        pattern: str | None = None,
        module_type: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> wire.Histogram:
        """A histogram merged over the run or some of its steps, or at the measured step at or before `step`."""
        chosen = _chosen(layer, pattern, module_type, rank, first_step, last_step)
        return self.get(f"/runs/{quoted(run_id)}/histogram", wire.Histogram, {"name": name, "step": step, **chosen})

    def compare(
        self,
        run_ids: Sequence[str],
        metric: str | Sequence[str],
        *,
        layer: str | None = None,
        pattern: str | None = None,
        module_type: str | None = None,
        points: int = 500,
        axis: Axis = "step",
        rank: int | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> wire.Comparison:
        """Several runs on a metric, of the model or of layers, with their merged metrics and last scalars.

        With several metrics each run's `series` is that of the first, and the others are in its `more`.
        """
        chosen = _chosen(layer, pattern, module_type, rank, first_step, last_step)
        query = {"run": list(run_ids), "metric": _several(metric), "points": points, "axis": axis, **chosen}
        return self.get("/compare", wire.Comparison, query)

    def events(
        self,
        run_id: str,
        *,
        cursor: int = 0,
        limit: int = 1000,
        newest: bool = False,
        until: float | None = None,
    ) -> wire.EventPage:
        """What happened to a run (until a time), oldest first; the answer's cursor asks for what came later.

        If there are more than `limit`, the answer has the oldest, or the newest.
        """
        query = {"cursor": cursor, "limit": limit, "newest": newest or None, "until": until}
        return self.get(f"/runs/{quoted(run_id)}/events", wire.EventPage, query)

    def incidents(
        self,
        *,
        project: str | None = None,
        run_id: str | None = None,
        alert: str | None = None,
        severity: str | None = None,
        state: wire.IncidentState | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.IncidentPage:
        """A page of alerts, from when they fired until they ended, newest first."""
        filters = {"project": project, "run": run_id, "alert": alert, "severity": severity, "state": state}
        query = {**filters, "cursor": cursor, "limit": limit}
        return self.get("/events", wire.IncidentPage, query)

    def incident(self, incident_id: str) -> wire.Incident:
        """One alert, from when it fired until it ended."""
        return self.get(f"/events/{quoted(incident_id)}", wire.Incident)

    def note(self, run_id: str, note: wire.NoteCreate) -> wire.Event:
        """Write into a run's timeline."""
        body = wire.encode_message(note, wire.JSON)
        path = f"/runs/{quoted(run_id)}/notes"
        return self.send("POST", path, wire.Event, content=body, content_type=wire.JSON)

    def firing(self, run_id: str) -> list[wire.Incident]:
        """The alerts that fire for one run now; the token that sends the run is enough."""
        return self.get(f"/runs/{quoted(run_id)}/alerts", wire.IncidentPage).events

    def acknowledge(self, incident_id: str, *, undo: bool = False) -> wire.Incident:
        """Note that you take care of an incident; `undo` takes its acknowledgement back, whoever made it."""
        method = "DELETE" if undo else "POST"
        return self.send(method, f"/events/{quoted(incident_id)}/acknowledge", wire.Incident)

    def try_targets(self) -> list[wire.TriedTarget]:
        """Have the server send one message to each of its targets; which of them took it."""
        return self.send("POST", "/alerts/test", wire.TriedTargetList).targets

    def silence(self, silence: wire.SilenceCreate) -> wire.Silence:
        """Keep matching incidents from being sent."""
        return self.post("/silences", silence, wire.Silence)

    def catalogue(self) -> wire.Catalogue:
        """Metrics, statistics, scalars and strategies that the server knows."""
        return self.get("/metrics-catalogue", wire.Catalogue)

    def update_run(self, run_id: str, update: wire.RunUpdate) -> wire.Run:
        """Change a run's state, name, group, tags, notes, or the runs among whose seeds it counts."""
        body = wire.encode_message(update, wire.JSON)
        return self.send("PATCH", f"/runs/{quoted(run_id)}", wire.Run, content=body, content_type=wire.JSON)

    def delete_run(self, run_id: str, *, undo_seconds: int = 0) -> wire.Deleted:
        """Delete a run for good; with `undo_seconds`, `restore_run` may undo it for so long."""
        query = {"undo_seconds": undo_seconds or None}
        return self.send("DELETE", f"/runs/{quoted(run_id)}", wire.Deleted, query=query)

    def restore_run(self, run_id: str) -> wire.Run:
        """Undo a deletion that was asked for with `undo_seconds`: the run is as it was."""
        return self.send("POST", f"/runs/{quoted(run_id)}/restore", wire.Run)

    def create_token(self, create: wire.TokenCreate) -> wire.TokenCreated:
        """Make a token; its secret is in this answer and nowhere else. Needs an administrator's token."""
        body = wire.encode_message(create, wire.JSON)
        return self.send("POST", "/tokens", wire.TokenCreated, content=body, content_type=wire.JSON)

    def tokens(self) -> wire.TokenList:
        """Every token without its secret. Needs an administrator's token."""
        return self.get("/tokens", wire.TokenList)

    def revoke_token(self, token_id: str) -> wire.Token:
        """Revoke a token for good. Needs an administrator's token."""
        return self.send("DELETE", f"/tokens/{quoted(token_id)}", wire.Token)

    @contextmanager
    def export(
        self, run_id: str, export_format: ExportFormat, *, layers: bool = True, ranks: bool = False
    ) -> Iterator[ExportStream]:
        """All data of a run, as the server streams it; with `ranks` also each rank's own totals.

        Raises:
            ServerUnreachable: nothing answers, or the stream breaks off before its end.
        """
        query = {"format": export_format, "layers": str(layers).lower(), "ranks": str(ranks).lower()}
        try:
            with self._http.stream("GET", f"/api/v1/runs/{quoted(run_id)}/export", params=query) as response:
                if response.is_error:
                    response.read()
                    raise refusal(response)
                lines = response.headers.get("Collage-Lines")
                yield ExportStream(response.iter_bytes(), None if lines is None else int(lines))
        except httpx.HTTPError as error:
            raise ServerUnreachable(
                f"no answer from {self.server_url}, or it broke off ({error}); run the export again"
            ) from error

    def frame(self, runs: str | Iterable[str] | None = None, *, layers: bool = True, **filters: Any) -> Any:
        """Curves of runs by id, or of all runs that match the filters of `runs`, as one `pyarrow.Table`.

        Columns are those of a Parquet export after `run`: a row a step for the whole model (`layer` is null), with
        `layers` one a step and layer, too; null where a run has no such number. `.to_pandas()` makes a pandas frame
        of it and `polars.DataFrame(…)` a Polars one, also of the tables below. Needs the extra `parquet`.

        Raises:
            CollageError: pyarrow is not installed, or no run is left.
        """
        pyarrow = load_pyarrow()
        from pyarrow.parquet import read_table

        ids = [run.run_id for run in self.all_runs(**filters)] if runs is None else runs
        tables = []
        for run_id in [ids] if isinstance(ids, str) else ids:
            with self.export(run_id, "parquet", layers=layers) as stream:
                content = pyarrow.BufferReader(b"".join(stream.parts))
                table = read_table(content, page_checksum_verification=True)
            tables.append(table.add_column(0, "run", pyarrow.array([run_id] * len(table), pyarrow.string())))
        if not tables:
            raise CollageError(f"no run is left by {filters or 'an empty selection'}; client.runs() lists them")
        return pyarrow.concat_tables(tables, promote_options="permissive")

    def runs_frame(self, *, config: Sequence[str] = (), **filters: Any) -> Any:
        """All runs that match the filters of `run_table`, newest first, as a `pyarrow.Table` with one row per run.

        Columns: who the run is, its state, health and headline; the metrics over the recent steps that the health
        is judged by (`first_step` to `judged_step`), under their keys; the last logged values, and the entries of
        the configuration that `config` names, as `config.PATH`. Null where a run has no such value. Leaves out
        damaged runs, with a warning. Needs the extra `parquet`.

        Raises:
            CollageError: pyarrow is not installed.
        """
        rows: list[wire.RunRow] = []
        place, total = 0, 1
        while place < total:
            page = self.run_table(sort="created_at", offset=place, limit=_ROWS_A_PAGE, config=config, **filters)
            rows += page.rows
            _warn_of(page.damaged)
            place, total = place + (len(page.rows) + len(page.damaged) or page.total), page.total
        return table_of([run_columns(row, config) for row in rows])

    def layers_frame(
        self,
        run_id: str,
        metrics: Sequence[str] = ("edq_ratio", "lost_update_ratio", "intended_norm"),
        *,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> Any:
        """The layers of a run as a `pyarrow.Table`: a row a layer, with `metrics` merged over these steps, or all.

        Columns: `layer`, `shape`, `dtype`, `elements`, `module_type`, and each metric under its key, null where it
        is undefined. Needs the extra `parquet`.

        Raises:
            CollageError: pyarrow is not installed.
        """
        rows = {
            layer.name: {"layer": layer.name, **{name: getattr(layer, name) for name in _OF_LAYER}}
            for layer in self.layers(run_id).layers
        }
        for metric in metrics:
            found = self.heatmap(run_id, metric, points=1, first_step=first_step, last_step=last_step)
            for name, values in zip(found.layers, found.values, strict=True):
                rows[name][metric] = plain_number(values[-1]) if values else None
        return table_of(list(rows.values()))

    def create_run(self, project: str, create: wire.RunCreate) -> wire.Run:
        """Create a run, or resume the one of this id."""
        return self.post(f"/projects/{quoted(project)}/runs", create, wire.Run)

    def create_attempt(self, run_id: str, create: wire.AttemptCreate) -> wire.Attempt:
        """Register a launch."""
        return self.post(f"/runs/{quoted(run_id)}/attempts", create, wire.Attempt)

    def create_stream(self, run_id: str, create: wire.StreamCreate) -> wire.Stream:
        """Register a stream."""
        return self.post(f"/runs/{quoted(run_id)}/streams", create, wire.Stream)

    def send_reports(self, stream_id: str, batch: wire.ReportBatch) -> wire.BatchAnswer:
        """Send reports; durable when this returns."""
        return self.post(f"/streams/{quoted(stream_id)}/reports", batch, wire.BatchAnswer, wire.encode_batch)


def _several(metric: str | Sequence[str]) -> list[str]:
    return [metric] if isinstance(metric, str) else list(metric)


def _chosen(
    layer: str | None,
    pattern: str | None,
    module_type: str | None,
    rank: int | None = None,
    first_step: int | None = None,
    last_step: int | None = None,
) -> dict[str, Any]:
    """The parameters that narrow a question to layers, a rank and steps."""
    layers = {"layer": layer, "pattern": pattern, "module_type": module_type}
    return {**layers, "rank": rank, "from": first_step, "to": last_step}
