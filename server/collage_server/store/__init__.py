"""Storage: the only room that knows a database. Everything outside goes through the contract."""

from collage_server.store.access.contract import AccessStore, ProjectUsage
from collage_server.store.contract import (
    READERS,
    EventStore,
    GroupOutcome,
    LatestPoint,
    NewEvent,
    Points,
    ReportGroup,
    ReportJournal,
    Retention,
    RunPageRecord,
    RunQuery,
    RunRecord,
    RunRevision,
    ScalarPoints,
    Sealing,
    SealLimits,
    Selection,
    Sizes,
    Snapshot,
    Store,
    StreamRecord,
)
from collage_server.store.journal.reports import report_bytes
from collage_server.store.postgresql import PostgresqlStore
from collage_server.store.quota import CountedRows
from collage_server.store.sqlite import SqliteStore

__all__ = [
    "AccessStore",
    "CountedRows",
    "EventStore",
    "GroupOutcome",
    "LatestPoint",
    "NewEvent",
    "Points",
    "PostgresqlStore",
    "ProjectUsage",
    "READERS",
    "ReportGroup",
    "ReportJournal",
    "Retention",
    "RunPageRecord",
    "RunQuery",
    "RunRecord",
    "RunRevision",
    "ScalarPoints",
    "SealLimits",
    "Sealing",
    "Selection",
    "Sizes",
    "Snapshot",
    "SqliteStore",
    "Store",
    "StreamRecord",
    "report_bytes",
]
