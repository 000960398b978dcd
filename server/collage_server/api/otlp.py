"""OpenTelemetry's metrics as logged values of a run: OTLP over HTTP, in protobuf or JSON.

A trainer that exports its loss, rate, reward or gradient norm so needs no line of ours. `ingest/otlp_messages.py`
reads messages, here they become reports of a run (`tests/server/test_otlp.py`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec
from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.bodies import body_lease, content_type_of, read_body
from collage_server.api.reports import store_batch
from collage_server.api.responses import describes
from collage_server.app_state import AppState, app_state_of
from collage_server.auth.bearer import principal_of
from collage_server.auth.principals import Principal
from collage_server.errors import Busy, Forbidden, ServerError, TooLarge, Unprocessable
from collage_server.ingest.otlp_messages import PROTOBUF, Attribute, DataPoint, Export, export_in, response
from collage_server.store import StreamRecord

__all__ = ["router"]

_ROLE: Final = "otlp"
"""Of the second writer, in a run that an agent reports."""
_RUN: Final = ("collage.run_id", "service.instance.id")
_IDENTITY: Final = ("service.name", "service.namespace", "service.instance.id", "host.name", "process.pid")
_STEPS: Final = ("step", "global_step", "training_step", "iteration")
_STEP_NAME: Final = re.compile(r"(.*_)?(global_step|train_step|training_step|trainer_step)|step|iteration")
_KNOWN_NAMES: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"loss|(.*_)?train(ing)?_loss", "loss"),
        (r"(.*_)?(eval|val|valid|validation)_loss", "validation_loss"),
        (r"lr|(.*_)?learning_rate", "learning_rate"),
        (r"(.*_)?grad(ient)?_norm", "grad_norm_unclipped"),
        (r"reward|(.*_)?(train|mean)_reward|(.*_)?reward_mean", "reward"),
    )
)
_LONGEST_NAME: Final = wire.LIMITS["name_characters"]
_MOST_NAMES: Final = wire.LIMITS["scalars_per_report"]
_MOST_STEPS: Final = 2**53
_NOT_RECORDED: Final = 1
_NANOSECONDS: Final = 1e-9


class _Source(NamedTuple):
    """A process that exports: its attributes, where they put its values, and what each time brought.

    values: by (time in nanoseconds, the step that stands with it, if one does).
    """

    attributes: Mapping[str, Any]
    values: Mapping[tuple[int, int | None], Mapping[str, float]]

    @property
    def size(self) -> int:
        return sum(map(len, self.values.values()))

    @property
    def run_id(self) -> str:
        """Raises Unprocessable if no attribute names the run."""
        for key in _RUN:
            if (told := str(self.attributes.get(key, ""))) != "":
                return told
        raise Unprocessable(
            "the resource names no run: start the training with OTEL_RESOURCE_ATTRIBUTES=collage.run_id=ID, or set "
            "service.instance.id",
            field="resource",
        )

    @property
    def rank(self) -> int:
        told = self.attributes.get("collage.rank", self.attributes.get("rank", 0))
        return int(told) if str(told).isdecimal() and int(told) <= _MOST_STEPS else 0

    def id_of(self, *keys: str) -> str:
        """A short id of these attributes, of the run and the rank."""
        told = [self.run_id, *(str(self.attributes.get(key, "")) for key in keys)]
        return f"{_ROLE}-{blake2b(wire.encode_json(told), digest_size=16).hexdigest()}"


class _Refused:
    """Data points that are not kept, and why the first of them is not."""

    def __init__(self) -> None:
        self.count = 0
        self.error: ServerError | None = None

    def add(self, count: int, why: ServerError | str) -> None:
        self.count += count
        if count and self.error is None:
            self.error = why if isinstance(why, ServerError) else Unprocessable(why, field="metrics")


def _sources(export: Export, refused: _Refused) -> list[_Source]:
    """The processes of a message with their values."""
    found = []
    for entry in export.resource_metrics:
        points = [
            (metric.name, point)
            for scope in entry.scope_metrics
            for metric in scope.metrics
            for point in metric.points()
        ]
        source = _Source(_plain(entry.resource.attributes), _values(points, refused))
        if source.values:
            found.append(source)
    return found


def _plain(attributes: Sequence[Attribute]) -> dict[str, Any]:
    """Attributes that hold a single value."""
    held = {
        attribute.key: next(filter(lambda given: given is not None, msgspec.structs.astuple(attribute.value)), None)
        for attribute in attributes
    }
    return {key: value for key, value in held.items() if value is not None}


def _values(
    points: Sequence[tuple[str, DataPoint]], refused: _Refused
) -> dict[tuple[int, int | None], dict[str, float]]:
    steps = {point.time_unix_nano: step for name, point in points if (step := _step_of(name, point)) is not None}
    found: dict[tuple[int, int | None], dict[str, float]] = defaultdict(dict)
    owners: dict[str, str] = {}
    for name, point in points:
        if point.flags & _NOT_RECORDED or _step_of(name, point) is not None:
            continue
        labels = _plain(point.attributes)
        own = next((key for key in _STEPS if _step(labels.get(key)) is not None), None)
        step = steps.get(point.time_unix_nano) if own is None else _step(labels.pop(own))
        shown = _known_name(name)
        if owners.setdefault(shown, name) != name:
            shown = name
        shown += "".join(f"/{key}={value}" for key, value in sorted(labels.items()))
        named, there = _named(shown, point), found[point.time_unix_nano, step]
        if problem := _problem(shown, point, named, there):
            refused.add(1, problem)
        else:
            there.update(named)
    return {place: values for place, values in found.items() if values}


def _step_of(name: str, point: DataPoint) -> int | None:
    """The step that a point says, if it is one of a gauge of steps."""
    return _step(_number(point)) if _STEP_NAME.fullmatch(_last(name)) else None


def _problem(name: str, point: DataPoint, named: Mapping[str, float], there: Mapping[str, float]) -> str | None:
    """Why a point's values cannot be kept beside those that are there, if they cannot."""
    if not point.time_unix_nano:
        return f"{name[:40]!r}: a data point has no time_unix_nano, so that it cannot be told from its repetition"
    if not 0 < len(name) <= _LONGEST_NAME - len(f"{_ROLE}//count") or "\0" in name:
        return f"{name[:40]!r}: names with their attributes have 1 to {_LONGEST_NAME} characters, none of them NUL"
    if _number(point) is None and point.count is None:
        return f"{name[:40]!r}: a data point has no value"
    if named.keys() & there.keys():
        return f"{name[:40]!r} comes twice at one time: tell its points apart by an attribute"
    return None


def _named(name: str, point: DataPoint) -> dict[str, float]:
    number = _number(point)
    if number is not None:
        return {name: number}
    totals = {f"{name}/count": float(point.count or 0)}
    return totals if point.sum is None else {**totals, f"{name}/sum": point.sum}


def _number(point: DataPoint) -> float | None:
    value = point.as_double if point.as_double is not None else point.as_int
    return None if value is None else float(value)


def _step(value: Any) -> int | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if math.isfinite(number) and 0 <= number <= _MOST_STEPS and number.is_integer() else None


def _last(name: str) -> str:
    return re.split(r"[./:]", name)[-1].lower()


def _known_name(name: str) -> str:
    """What the project calls it, if it is one of the values that every trainer has."""
    return next((known for pattern, known in _KNOWN_NAMES if pattern.fullmatch(_last(name))), name)


router = APIRouter(tags=["reports"])
_DESCRIBED: Final = describes(None)
_DESCRIBED["openapi_extra"]["requestBody"] = {"required": True, "content": {PROTOBUF: {}, wire.JSON: {}}}


@router.post("/v1/metrics", **_DESCRIBED)
async def add_metrics(request: Request) -> Response:
    """OTLP's metrics (protobuf or JSON) as logged values, each export stored exactly once by its time.

    The resource's `collage.run_id`, else its `service.instance.id`, names the run; a run that is not there is made.
    `partial_success` reports what is not kept.
    """
    app_state, content_type = app_state_of(request), content_type_of(request, (PROTOBUF, wire.JSON))
    try:
        with body_lease(request, app_state, content_type) as held:
            body = await read_body(request, held, content_type)
            refused = await _added(request, body, content_type)
            why = "" if refused.error is None else refused.error.message
            return Response(response(refused.count, why, content_type), media_type=content_type)
    except TooLarge as error:
        raise TooLarge(
            f"an export has at most {error.limit} bytes: let a collector send smaller batches, by its "
            "send_batch_max_size",
            field="body",
            limit=error.limit,
        ) from error


async def _added(request: Request, body: bytes | bytearray, content_type: str) -> _Refused:
    """Keep what a body holds; what is refused.

    Raises:
        ServerError: all of it is.
    """
    app_state, refused, kept = app_state_of(request), _Refused(), 0
    async with app_state.decoding:
        export = await run_in_threadpool(export_in, body, content_type)
        sources = await run_in_threadpool(_sources, export, refused)
    for source in sources:
        try:
            size = len(body) // len(sources)
            kept += await _keep(app_state, principal_of(request), source, refused, size)
        except Busy:
            raise
        except ServerError as error:
            refused.add(source.size, error)
    if refused.error is not None and not kept:
        raise refused.error
    return refused


async def _keep(app_state: AppState, principal: Principal, source: _Source, refused: _Refused, size: int) -> int:
    """Store a process's values, if they are new; how many are stored now or were before."""
    stream = await run_in_threadpool(_stream, app_state, principal, source)
    prefix = f"{_ROLE}/" if stream.attempt < 0 else ""
    pieces = [
        (time, step, {f"{prefix}{name}": values[name] for name in names})
        for (time, step), values in sorted(source.values.items(), key=lambda entry: entry[0][0])
        for names in _batches(sorted(values))
    ]
    digests = [(time, _digest(step, values)) for time, step, values in pieces]
    places = await run_in_threadpool(app_state.store.journal.number_exports, stream, digests)
    reports = []
    for (time, step, values), numbered in zip(pieces, places, strict=True):
        if numbered is None:
            refused.add(len(values), "older than the 128 newest exports of this process, which are told apart")
            continue
        seq, count = numbered
        told = count if step is None else step
        reports.append(wire.Report(seq=seq, step=told, time=time * _NANOSECONDS, scalars=values))
    if not reports:
        return 0
    stored = await store_batch(app_state, stream.stream_id, wire.ReportBatch(reports=reports), size)
    for entry in stored.rejected:
        refused.add(len(reports[entry.index].scalars), entry.message)
    return stored.accepted + stored.duplicates


def _digest(step: int | None, names: Iterable[str]) -> int:
    """Tells reports of one time apart."""
    return int.from_bytes(blake2b("\0".join([str(step), *names]).encode(), digest_size=7).digest())


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _MOST_NAMES):
        yield names[start : start + _MOST_NAMES]


def _stream(app_state: AppState, principal: Principal, source: _Source) -> StreamRecord:
    """The stream of a process; run, launch and stream are made where they are not there.

    Raises:
        Forbidden: the token is not for the project.
        Conflict, Gone: the run is another project's, or was deleted.
    """
    store, now, run_id = app_state.store, app_state.clock(), source.run_id
    owner = store.access.project_of(run_id)
    project = str(source.attributes.get("collage.project") or _project(principal, owner))
    if not principal.owns(project):
        raise Forbidden(f"this token is not for project {project!r}", field="collage.project")
    stream_id = source.id_of(*_IDENTITY, "collage.launch_id", "collage.rank", "rank")
    if owner == project and (known := app_state.registry.cached(stream_id)) is not None:
        return known
    if owner != project:
        name = str(source.attributes.get("service.name", ""))[:_LONGEST_NAME] or None
        create = _message(wire.RunCreate, run_id=run_id, name=name, config=dict(source.attributes))
        store.runs.create(project, create, now, app_state.quotas.check)
    launches = [attempt.launch_id for attempt in store.runs.get(run_id).attempts]
    role = None if all(launch.startswith(f"{_ROLE}-") for launch in launches) else _ROLE
    launched = "collage.launch_id" in source.attributes
    launch_id = source.id_of("collage.launch_id") if launched else stream_id
    first = min((step for _, step in source.values if step is not None), default=1)
    store.streams.create_attempt(run_id, wire.AttemptCreate(launch_id=launch_id, first_step=first, role=role), now)
    create_stream = wire.StreamCreate(stream_id=stream_id, launch_id=launch_id, rank=source.rank)
    store.streams.create_stream(run_id, create_stream, now)
    return app_state.registry.load(stream_id)


def _project(principal: Principal, owner: str | None) -> str:
    if owner is not None and principal.owns(owner):
        return owner
    return next(iter(principal.projects)) if principal.projects and len(principal.projects) == 1 else "default"


def _message(kind: type[wire.RunCreate], **fields: Any) -> wire.RunCreate:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise Unprocessable(f"the resource's attributes make no run: {error}", field="resource") from error
