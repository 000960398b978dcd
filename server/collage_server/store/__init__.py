"""Storage: the only room that knows a database. Everything outside goes through the contract."""

from collage_server.store.access.contract import AccessStore, ProjectUsage
from collage_server.store.contract import (
    READERS,
    GroupOutcome,
    LatestPoint,
    Life,
    NewEvent,
    Points,
    ReportGroup,
    RunPageRecord,
    RunQuery,
    RunRecord,
    RunRevision,
    ScalarPoints,
    SealLimits,
    Selection,
    Sizes,
    Store,
    StreamRecord,
)
from collage_server.store.postgresql import PostgresqlStore
from collage_server.store.quota import CountedRows
from collage_server.store.sqlite import SqliteStore

__all__ = [
    "AccessStore",
    "CountedRows",
    "GroupOutcome",
    "LatestPoint",
    "Life",
    "NewEvent",
    "Points",
    "PostgresqlStore",
    "ProjectUsage",
    "READERS",
    "ReportGroup",
    "RunPageRecord",
    "RunQuery",
    "RunRecord",
    "RunRevision",
    "ScalarPoints",
    "SealLimits",
    "Selection",
    "Sizes",
    "SqliteStore",
    "Store",
    "StreamRecord",
]
