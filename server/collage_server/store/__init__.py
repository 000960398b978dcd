"""Storage: the only package that uses a database. This module lists the names that other packages use."""

from collage_server.store.access.access_store import AccessStore, LogOut
from collage_server.store.archive.file_storage import ArchiveFiles, archive_files
from collage_server.store.archive.finished import FinishedRun, LatePoints, VisiblePart
from collage_server.store.archive.parquet import ROW_COLUMNS, Footer, copy_points, write_points
from collage_server.store.archive.paths import COPY, archived_path, project_folder
from collage_server.store.archive.segments import Verification, Verified
from collage_server.store.journal.report_journal import ReportJournal
from collage_server.store.postgresql import PostgresqlStore
from collage_server.store.reading.snapshot import Snapshot
from collage_server.store.records import (
    READERS,
    GroupOutcome,
    GroupQuery,
    IncidentQuery,
    LatestPoint,
    NewEvent,
    NewIncident,
    Points,
    ReportedState,
    ReportGroup,
    RunFilter,
    RunQuery,
    RunRecord,
    RunRevision,
    ScalarPoints,
    Selection,
    Sizes,
    StreamRecord,
    TableQuery,
    state_at,
)
from collage_server.store.runs.run_changes import QuotaName
from collage_server.store.runs.run_summary import KeptPoint, LiveRun, NewestPoint, RunProgress
from collage_server.store.sealing.archiving import Archiving
from collage_server.store.sqlite import SqliteStore
from collage_server.store.store import Store

__all__ = [
    "AccessStore",
    "ArchiveFiles",
    "Archiving",
    "COPY",
    "FinishedRun",
    "Footer",
    "GroupOutcome",
    "GroupQuery",
    "IncidentQuery",
    "KeptPoint",
    "LatePoints",
    "LatestPoint",
    "LiveRun",
    "LogOut",
    "NewEvent",
    "NewIncident",
    "NewestPoint",
    "ROW_COLUMNS",
    "Points",
    "PostgresqlStore",
    "QuotaName",
    "READERS",
    "ReportGroup",
    "ReportJournal",
    "ReportedState",
    "RunFilter",
    "RunProgress",
    "RunQuery",
    "RunRecord",
    "RunRevision",
    "ScalarPoints",
    "Selection",
    "Sizes",
    "Snapshot",
    "SqliteStore",
    "Store",
    "StreamRecord",
    "TableQuery",
    "Verification",
    "Verified",
    "VisiblePart",
    "archive_files",
    "archived_path",
    "copy_points",
    "project_folder",
    "state_at",
    "write_points",
]
