"""The state of a view and its address: all choices of a reader are in the URL and are restored from it.

Addresses are fixed, because alerts, reports and people's links hold them: a parameter may be added, none renamed
(`tests/dashboard/test_view.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, get_args
from urllib.parse import parse_qsl, quote, unquote, urlencode

from collage_monitor import wire
from collage_monitor.client import Axis

__all__ = [
    "ARCHIVED",
    "FILTERS",
    "GROUPS",
    "Lines",
    "MAXIMUM_RUNS",
    "Order",
    "Page",
    "Rows",
    "Scale",
    "Tab",
    "View",
    "comparison_of",
    "read_address",
    "read_steps",
    "usual",
    "write_address",
    "write_steps",
]

Page = Literal["runs", "compare", "run", "incidents", "incident", "missing"]
Order = Literal["depth", "worst"]
Rows = Literal["all", "block", "type"]
Tab = Literal["layers", "curves", "norms", "states", "classes", "oracle", "about"]
Lines = Literal["run", "strategy"]
Scale = Literal["linear", "log"]
MAXIMUM_RUNS: Final = 60
"""Runs that one comparison shows. A view counts those beyond: the page says what is left out."""
FILTERS: Final = ("project", "strategy", "group", "tag", "state", "health")
"""What the table of runs can be filtered by."""
ARCHIVED: Final = "archived"
"""The tag of runs that the table leaves out."""
GROUPS: Final[dict[wire.GroupBy, str]] = {
    "strategy": "strategy",
    "group": "group and strategy",
    "configuration": "configuration",
}
"""What runs can be grouped by, in words."""
_MOST_OPEN: Final = 100
_MOST_COLUMNS: Final = 40
_MOST_CONDITIONS: Final = 16
_MOST_PINS: Final = 10
_SORTS: Final = frozenset(get_args(wire.RunSort))
_Choice = TypeVar("_Choice", bound=str | None)


@dataclass(frozen=True, slots=True)
class View:
    """A reader's choices. None: `metric` and `lines` the page's own choice, `layer` the whole model, `step` all.

    `order` and `rows`: how a heatmap's layers are sorted and grouped.
    `pair`: two strategies to compare, by title.
    `lines`: a curve a run, or a strategy's mean over its runs. `smoothing` in [0, 0.99] weighs the past
    in logged scalars only; measured metrics are never smoothed. `scale` is that of the curves' values.
    `zoom`: both ends of what is shown of `axis`, in its unit. `at`: the first and last of the steps at which the
    reader asks what changed; one step is both.
    The table of runs has `query`, filters, and what it is sorted by, with a "-" before it where the largest comes
    first. `by`: what runs are grouped by, and the keys of the groups that are `opened`. `where`: conditions on
    columns and entries of configurations. `archived`: "1" shows the archived ones, too. `columns`: those that stand
    after the name, in order, fields of rows or paths of entries; none: the usual ones. `pins`: runs that stay on
    top, with the `baseline`, which numbers are compared with.
    An incident is found by its id, or is the newest of an `alert` on a run.
    `left_out`: requested runs beyond the `MAXIMUM_RUNS` of a comparison.
    """

    page: Page = "runs"
    runs: tuple[str, ...] = field(default=())
    metric: str | None = None
    axis: Axis = "step"
    layer: str | None = None
    step: int | None = None
    smoothing: float = 0.0
    pair: tuple[str, ...] = ()
    lines: Lines | None = None
    order: Order = "depth"
    rows: Rows = "all"
    tab: Tab = "layers"
    scale: Scale = "linear"
    zoom: tuple[float, float] | None = None
    at: tuple[int, int] | None = None
    query: str = ""
    project: str | None = None
    strategy: str | None = None
    group: str | None = None
    tag: str | None = None
    state: str | None = None
    health: str | None = None
    sort: str = "-updated_at"
    by: wire.GroupBy | None = None
    where: tuple[str, ...] = ()
    archived: str | None = None
    columns: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    baseline: str | None = None
    opened: tuple[str, ...] = ()
    incident: str | None = None
    alert: str | None = None
    severity: str | None = None
    left_out: int = 0


def comparison_of(run_ids: Sequence[str]) -> View:
    """The comparison of these runs: the first `MAXIMUM_RUNS`, and how many more are left out."""
    runs = tuple(dict.fromkeys(run_ids))
    return View(page="compare", runs=runs[:MAXIMUM_RUNS], left_out=max(len(runs) - MAXIMUM_RUNS, 0))


def read_address(pathname: str | None, search: str | None) -> View:
    """The view behind an address; unreadable parts keep their default, so an old link still opens."""
    given = parse_qsl((search or "").removeprefix("?"))
    values = dict(given)
    page, runs, incident = _place(pathname or "/", [value for name, value in given if name == "run"])
    compared = comparison_of(runs) if page == "compare" else View(runs=runs)
    return View(
        page=page,
        runs=compared.runs,
        left_out=compared.left_out + (_whole(values.get("left_out")) or 0 if page == "compare" else 0),
        incident=incident,
        alert=values.get("alert"),
        severity=values.get("severity"),
        metric=values.get("metric"),
        axis=_choice(values.get("axis"), get_args(Axis), "step"),
        layer=values.get("layer"),
        step=_whole(values.get("step")),
        smoothing=_share(values.get("smoothing")),
        lines=_choice(values.get("lines"), (*get_args(Lines), None), None),
        order=_choice(values.get("order"), get_args(Order), "depth"),
        rows=_choice(values.get("rows"), get_args(Rows), "all"),
        tab=_choice(values.get("tab"), get_args(Tab), "layers"),
        scale=_choice(values.get("scale"), get_args(Scale), "linear"),
        zoom=_zoom(values.get("from"), values.get("to")),
        at=read_steps(values.get("at")),
        query=values.get("q", ""),
        sort=_sort(values.get("sort")),
        by=_choice(values.get("by"), (*GROUPS, None), None),
        archived=_choice(values.get("archived"), ("1", None), None),
        baseline=values.get("baseline"),
        **_lists(given),
        **_filters(values),
    )


def write_address(view: View) -> tuple[str, str]:
    """(pathname, search) of a view; only what differs from the default is written."""
    pairs: list[tuple[str, str]] = []
    pathname = "/"
    if view.page == "run":
        pathname = f"/run/{quote(view.runs[0], safe='')}"
    elif view.page in {"compare", "incidents", "incident"}:
        pathname = f"/{view.page}"
        if view.incident is not None:
            pathname += f"/{quote(view.incident, safe='')}"
        pairs += [("run", run) for run in view.runs]
    defaults = View()
    for name, attribute in _QUERY:
        value = getattr(view, attribute)
        if value != getattr(defaults, attribute):
            pairs.append((name, f"{value:g}" if isinstance(value, float) else str(value)))
    pairs += [("at", write_steps(view.at))] if view.at else []
    pairs += [(name, f"{end:.15g}") for name, end in zip(("from", "to"), view.zoom or (), strict=False)]
    pairs += [(name, value) for name, attribute, _ in _LISTS for value in getattr(view, attribute)]
    return pathname, f"?{urlencode(pairs)}" if pairs else ""


_QUERY: Final = (
    ("metric", "metric"),
    ("axis", "axis"),
    ("layer", "layer"),
    ("step", "step"),
    ("smoothing", "smoothing"),
    ("lines", "lines"),
    ("order", "order"),
    ("rows", "rows"),
    ("tab", "tab"),
    ("scale", "scale"),
    ("q", "query"),
    *((name, name) for name in FILTERS),
    ("sort", "sort"),
    ("by", "by"),
    ("archived", "archived"),
    ("baseline", "baseline"),
    ("alert", "alert"),
    ("severity", "severity"),
    ("left_out", "left_out"),
)

_LISTS: Final = (
    ("where", "where", _MOST_CONDITIONS),
    ("column", "columns", _MOST_COLUMNS),
    ("pin", "pins", _MOST_PINS),
    ("open", "opened", _MOST_OPEN),
    ("pair", "pair", 2),
)
"""What may stand several times: its name in the address and in the view, and how many of it count."""


def usual(name: str) -> Any:
    """What a parameter of the address stands for if it is not given."""
    attribute = dict(_QUERY).get(name) or {own: attribute for own, attribute, _ in _LISTS}.get(name)
    return getattr(View(), attribute or ("runs" if name == "run" else name))


def _filters(values: Mapping[str, str]) -> dict[str, Any]:
    return {name: values.get(name) for name in FILTERS}


def _lists(given: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        attribute: tuple(dict.fromkeys(value for name, value in given if name == wanted))[:most]
        for wanted, attribute, most in _LISTS
    }


def _place(pathname: str, runs: Sequence[str]) -> tuple[Page, tuple[str, ...], str | None]:
    """Page, runs and incident."""
    parts = [unquote(part) for part in pathname.split("/") if part]
    if not parts:
        return "runs", (), None
    if parts == ["compare"]:
        return "compare", tuple(runs), None
    if len(parts) == 2 and parts[0] == "run":
        return "run", (parts[1],), None
    if parts == ["incidents"]:
        return "incidents", tuple(runs[:1]), None
    if parts[0] == "incident" and len(parts) <= 2:
        return "incident", tuple(runs[:1]), parts[1] if len(parts) == 2 else None
    return "missing", (), None


def _choice(value: str | None, choices: tuple[_Choice, ...], default: _Choice) -> _Choice:
    return next((choice for choice in choices if choice == value), default)


def _sort(value: str | None) -> str:
    return value if value and value.removeprefix("-") in _SORTS else View().sort


def _whole(value: str | None) -> int | None:
    return int(value) if value is not None and value.isascii() and value.isdigit() and len(value) < 16 else None


def read_steps(text: str | None) -> tuple[int, int] | None:
    """A step, "800" or "1,500", or a range of steps, "800-900", as its first and last; None for anything else."""
    plain = re.sub(r"[,\s]", "", text or "").replace("–", "-")
    ends = [_whole(part) for part in plain.split("-")]
    if None in ends or len(ends) > 2:
        return None
    first, last = ends[0] or 0, ends[-1] or 0
    return (first, last) if first <= last else None


def write_steps(steps: tuple[int, int]) -> str:
    """The text that `read_steps` reads as these steps."""
    first, last = steps
    return str(first) if first == last else f"{first}-{last}"


def _zoom(first: str | None, last: str | None) -> tuple[float, float] | None:
    try:
        ends = float(first or "nan"), float(last or "nan")
    except ValueError:
        return None
    return ends if 0 <= ends[0] < ends[1] < math.inf else None


def _share(value: str | None) -> float:
    try:
        number = float(value or 0.0)
    except ValueError:
        return 0.0
    return min(max(number, 0.0), 0.99) if math.isfinite(number) else 0.0
