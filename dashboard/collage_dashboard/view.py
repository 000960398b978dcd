"""The state of a view and its address: all choices of a reader are in the URL and are restored from it.

Addresses are fixed, because alerts, reports and people's links hold them: a parameter may be added, none renamed
(`tests/dashboard/test_view.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args
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
    "run_address",
    "usual",
    "write_address",
    "write_steps",
]

Page = Literal["first", "runs", "fleet", "compare", "run", "incidents", "incident", "missing"]
Order = Literal["depth", "worst"]
Rows = Literal["all", "block", "type"]
Tab = Literal["layers", "table", "histogram", "curves", "norms", "states", "classes", "oracle", "about"]
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


@dataclass(frozen=True, slots=True)
class View:
    """A reader's choices. None: `metric` and `lines` the page's own choice, `layer` the whole model, `step` all.

    `order` and `rows`: how a heatmap's layers are sorted and grouped.
    `pair`: two strategies to compare, by title.
    `lines`: a curve a run, or a strategy's mean over its runs. `smoothing` in [0, 0.99] weighs the past
    in logged scalars only; measured metrics are never smoothed. `scale` is that of the curves' values.
    `zoom`: both ends of what is shown of `axis`, in its unit. `at`: the first and last of the steps at which the
    reader asks what changed; one step is both. `schedule`: of the learning rate, by which a run's loss of updates
    is foretold.
    `panels`: the metrics whose curves a run's page draws, in order; none: the usual ones.
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
    panels: tuple[str, ...] = ()
    at: tuple[int, int] | None = None
    schedule: str = ""
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
    page = "runs" if page == "first" and given else page
    compared = comparison_of(runs) if page == "compare" else View(runs=runs)
    found: dict[str, Any] = {
        attribute: value
        for name, (attribute, read) in _PARAMETERS.items()
        if name in values and (value := read(values[name])) is not None
    }
    for name, (attribute, most) in _LISTS.items():
        found[attribute] = tuple(dict.fromkeys(value for own, value in given if own == name))[:most]
    left_out = compared.left_out + (found.pop("left_out", 0) if page == "compare" else 0)
    zoom = _zoom(values.get("from"), values.get("to"))
    return View(page=page, runs=compared.runs, incident=incident, zoom=zoom, **{**found, "left_out": left_out})


def write_address(view: View) -> tuple[str, str]:
    """(pathname, search) of a view; only what differs from the default is written."""
    pairs: list[tuple[str, str]] = []
    pathname = "/" if view.page == "first" else "/runs"
    if view.page == "run":
        pathname = f"/run/{quote(view.runs[0], safe='')}"
    elif view.page in {"fleet", "compare", "incidents", "incident"}:
        pathname = f"/{view.page}"
        if view.incident is not None:
            pathname += f"/{quote(view.incident, safe='')}"
        pairs += [("run", run) for run in view.runs]
    for name, (attribute, _) in _PARAMETERS.items():
        value = getattr(view, attribute)
        if value != getattr(_DEFAULTS, attribute):
            pairs.append((name, _written(value)))
    pairs += [(name, f"{end:.15g}") for name, end in zip(("from", "to"), view.zoom or (), strict=False)]
    pairs += [(name, value) for name, (attribute, _) in _LISTS.items() for value in getattr(view, attribute)]
    return pathname, f"?{urlencode(pairs)}" if pairs else ""


def run_address(run_id: str, layer: str | None = None) -> str:
    """The address of a run's page, or of one of its layers there."""
    return "".join(write_address(View(page="run", runs=(run_id,), layer=layer)))


def usual(name: str) -> Any:
    """What a parameter of the address stands for if it is not given."""
    return [] if name in {"run", *_LISTS} else getattr(_DEFAULTS, _PARAMETERS[name][0])


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return write_steps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _place(pathname: str, runs: Sequence[str]) -> tuple[Page, tuple[str, ...], str | None]:
    """Page, runs and incident."""
    match [unquote(part) for part in pathname.split("/") if part]:
        case []:
            return "first", (), None
        case ["runs" | "fleet" as page]:
            return page, (), None
        case ["compare"]:
            return "compare", tuple(runs), None
        case ["run", run]:
            return "run", (run,), None
        case ["incidents" | "incident" as page]:
            return page, tuple(runs[:1]), None
        case ["incident", incident]:
            return "incident", tuple(runs[:1]), incident
    return "missing", (), None


def _one_of(choices: Any) -> Callable[[str], str | None]:
    return lambda value: value if value in choices else None


def _sort(value: str) -> str | None:
    return value if value.removeprefix("-") in get_args(wire.RunSort) else None


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


def _share(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return min(max(number, 0.0), 0.99) if math.isfinite(number) else None


_DEFAULTS: Final = View()
_PARAMETERS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "metric": ("metric", str),
    "axis": ("axis", _one_of(get_args(Axis))),
    "layer": ("layer", str),
    "step": ("step", _whole),
    "smoothing": ("smoothing", _share),
    "lines": ("lines", _one_of(get_args(Lines))),
    "order": ("order", _one_of(get_args(Order))),
    "rows": ("rows", _one_of(get_args(Rows))),
    "tab": ("tab", _one_of(get_args(Tab))),
    "scale": ("scale", _one_of(get_args(Scale))),
    "q": ("query", str),
    **{name: (name, str) for name in FILTERS},
    "sort": ("sort", _sort),
    "by": ("by", _one_of(GROUPS)),
    "archived": ("archived", _one_of({"1"})),
    "baseline": ("baseline", str),
    "alert": ("alert", str),
    "severity": ("severity", str),
    "left_out": ("left_out", _whole),
    "at": ("at", read_steps),
    "schedule": ("schedule", str),
}
"""What may stand in an address: the view's field, and what reads it; None for what cannot be read."""
_LISTS: Final = {
    "where": ("where", 16),
    "column": ("columns", 40),
    "pin": ("pins", 10),
    "open": ("opened", 100),
    "pair": ("pair", 2),
    "panel": ("panels", 24),
}
"""What may stand several times: the view's field, and how many of it count."""
