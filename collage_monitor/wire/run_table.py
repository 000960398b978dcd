"""Messages about the table of runs: its rows, its groups, its filters, and views of it that people save.

`api/run_table.py` of the server answers with them; the dashboard's table and `list` read them. A field may be added
with a default, but none renamed: dashboards and servers of two versions meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

from msgspec import Meta, Struct, field

from collage_monitor.wire.answers import DamagedRun, RunDescription
from collage_monitor.wire.messages import Trained
from collage_monitor.wire.overview import Overview

__all__ = [
    "GroupBy",
    "GroupValue",
    "RUN_COLUMNS",
    "RunColumn",
    "RunFilters",
    "RunGroup",
    "RunGroups",
    "RunRow",
    "RunSort",
    "RunTable",
    "SavedView",
    "SavedViewCreate",
    "SavedViewList",
    "TableEntry",
    "WorstRun",
]

ColumnKind = Literal["word", "text", "count", "time", "number", "share", "ratio", "bytes", "curve"]
"""What a column holds. Only words and numbers sort and are conditions: texts and curves do not. Of a group of runs
a word is their first, a count or a time the newest, any other number their mean."""


class RunColumn(NamedTuple):
    """A column of the table of runs. `usual`: it is shown unless a reader chooses others."""

    key: str
    title: str
    kind: ColumnKind
    usual: bool = True

    @property
    def sorts(self) -> bool:
        """Whether the table can be sorted by it, and conditions name it."""
        return self.kind not in {"text", "curve"}


RUN_COLUMNS: Final = (
    RunColumn("name", "Run", "word"),
    RunColumn("health", "Judgement", "word"),
    RunColumn("strategy", "Strategy", "word"),
    RunColumn("loss", "Training loss", "number"),
    RunColumn("lost_update_ratio", "Lost", "share"),
    RunColumn("edq_ratio", "EDQ", "ratio"),
    RunColumn("trend", "EDQ over the run", "curve"),
    RunColumn("last_step", "Step", "count"),
    RunColumn("updated_at", "Updated (UTC)", "time"),
    RunColumn("bytes_per_parameter", "Bytes per parameter", "bytes"),
    RunColumn("tokens_per_second", "Tokens/s", "number"),
    RunColumn("state", "State", "word"),
    RunColumn("validation_loss", "Validation loss", "number"),
    RunColumn("state_decrement_ratio", "State decrement", "ratio"),
    RunColumn("project", "Project", "word"),
    RunColumn("tags", "Tags", "text"),
    RunColumn("notes", "Notes", "text"),
    RunColumn("group", "Group", "word", usual=False),
    RunColumn("dtype", "Dtype", "word", usual=False),
    RunColumn("created_at", "Created (UTC)", "time", usual=False),
)
"""The table of runs, from left to right: the server sorts and filters by it, the dashboard shows it."""
# What the table of runs can be sorted by.
if TYPE_CHECKING:
    RunSort = str
else:
    RunSort = Literal[tuple(column.key for column in RUN_COLUMNS if column.sorts)]
GroupBy = Literal["strategy", "group", "configuration"]
"""What runs of one project, strategy and dtype can be grouped by: nothing more, the group that who trained them
gave, or a configuration that differs in nothing but seeds."""


class RunRow(RunDescription, kw_only=True, frozen=True):
    """A run as a row of the table of runs; times as in `Run`. `overview` is null until it was evaluated for the
    first time.

    `configuration` is the same for runs of a project that are configured alike but for seeds; `is_treated`: people
    said to which it belongs. `config`: the entries that were asked for, by their path. `resumed_at`: the first
    steps of later launches that measure. `beside`: the first few names that second writers log; `reports` counts
    what is stored, theirs included.
    """

    strategy: str | None
    observed_strategy: str | None
    dtype: str | None
    overview: Overview | None
    trained: list[Trained] = field(default_factory=list)
    configuration: str | None = None
    is_treated: bool = False
    resumed_at: list[int] = field(default_factory=list)
    reports: int = 0

    @property
    def shown_strategy(self) -> str | None:
        """The label that the user gave, else what is seen."""
        return self.strategy or self.observed_strategy


class WorstRun(Struct, kw_only=True, frozen=True):
    """The run with the gravest verdict; among equals, the one that keeps the least of its updates."""

    run_id: str
    name: str
    short: str


class RunTable(Struct, kw_only=True, frozen=True):
    """A page of the table of runs. `total` counts the matching runs, `healths` counts them by health ("" if not
    known yet), and `live` counts the running ones likewise. `revision` changes with each change and evaluation of
    any of them, whether its row is on the page or not. `worst`: null where no run has a problem. `damaged`: runs
    whose rows of the page cannot be shown; the next page begins after `rows` and these.
    """

    rows: list[RunRow]
    total: int
    live: dict[str, int]
    revision: str = ""
    healths: dict[str, int] = field(default_factory=dict)
    worst: WorstRun | None = None
    damaged: list[DamagedRun] = field(default_factory=list)


class GroupValue(Struct, kw_only=True, frozen=True):
    """A number over `count` runs of a group: its mean and `spread`, the standard deviation of a single run, null
    of one."""

    value: float
    count: int
    spread: float | None


class RunGroup(Struct, kw_only=True, frozen=True):
    """Runs that differ only by seed, according to `GroupBy`: a row of the table of runs that opens into them.

    `key` opens it. `groups`: up to 20 group labels of the runs. `runs`: names by id of up to 20 runs, newest first;
    `count` is of all. `states` and `healths`: how many runs have each. `headline`: that of one run: of one with a
    problem if there is one, otherwise of one whose health is unknown.
    """

    key: str
    project: str
    strategy: str | None
    dtype: str | None
    groups: list[str]
    runs: dict[str, str]
    count: int
    states: dict[str, int]
    healths: dict[str, int]
    health: str
    headline: str
    numbers: dict[str, GroupValue]
    last_step: int | None
    updated_at: float


class TableEntry(Struct, kw_only=True, frozen=True):
    """Either a group, or a run of the open group above it."""

    group: RunGroup | None = None
    run: RunRow | None = None


class RunGroups(Struct, kw_only=True, frozen=True):
    """A page of the table of runs in groups; `total` counts groups and the runs of open ones. `damaged` as in
    `RunTable`."""

    rows: list[TableEntry]
    total: int
    damaged: list[DamagedRun] = field(default_factory=list)


class RunFilters(Struct, kw_only=True, frozen=True):
    """The existing values of each filter of the table of runs, with the number of runs for each."""

    project: dict[str, int]
    strategy: dict[str, int]
    group: dict[str, int]
    tag: dict[str, int]
    health: dict[str, int]


class SavedViewCreate(Struct, kw_only=True, frozen=True):
    """Save a view of the table of runs under a name, replacing an older one of that name.

    `search`: the query of the page's address, without its question mark.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
    search: Annotated[str, Meta(max_length=8192, pattern=r"^[!-~]*$")]


class SavedView(Struct, kw_only=True, frozen=True):
    """A saved view of a project, who saved it and when."""

    project: str
    name: str
    search: str
    made_by: str
    made_at: float


class SavedViewList(Struct, kw_only=True, frozen=True):
    """Saved views by project and name."""

    views: list[SavedView]
