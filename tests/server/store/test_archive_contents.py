"""What stands in archived files: which chunks become one, how layers are read out of it, and what reading asks."""

from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from collage_server.store import Selection
from collage_server.store.archive import archive_reader, logged_values
from collage_server.store.archive.archived_file import ArchivedFile
from collage_server.store.archive.file_storage import Folder
from collage_server.store.archive.logged_values import read_logged, write_logged
from collage_server.store.archive.parquet import (
    Contents,
    Footer,
    HeldPart,
    LoggedSeries,
    Rows,
    read_footer,
    read_layers,
    write_layers,
)
from collage_server.store.archive.segments import Segment, add_segment, model_level
from collage_server.store.chunks.blobs import LEVELS, ChunkInfo, PointRows
from collage_server.store.sealing.archive_plan import _due, _due_of_model
from pyarrow.parquet import ParquetWriter
from sqlalchemy import event

from benchmarks.archive import filled, reports
from tests.server.store.stores import archive_all, opened

pytestmark = pytest.mark.slow

ALL = frozenset(LEVELS)
POINTS, LAYERS, A_GROUP = 6, 11, 4


def chunk(number, levels=ALL, attempt=1):
    return ChunkInfo(attempt, number, 4, 256, 256 * number, 256 * number + 255, levels)


def without_checksums(*given, **more):
    """The writer of earlier releases."""
    assert more.pop("write_page_checksum")
    return ParquetWriter(*given, **more)


def chunks_by_level(infos, archived=None, *, over, without_layers=()):
    held: dict[tuple[int, int], set[int]] = {}
    for info in infos:
        for level in info.levels:
            if info.chunk not in without_layers:
                held.setdefault((info.attempt, level), set()).add(info.chunk)
    found: dict[int, list[tuple[int, ...]]] = {}
    for plan in _due(infos, held, archived or {}, over=over):
        found.setdefault(plan.level, []).append(plan.chunks)
    return found


def test_while_a_run_goes_on_whole_groups_become_files_without_the_newest_chunk():
    assert chunks_by_level([chunk(number) for number in range(9)], over=False) == {1: [(0, 1, 2, 3), (4, 5, 6, 7)]}
    assert chunks_by_level([chunk(number) for number in range(8)], over=False) == {1: [(0, 1, 2, 3)]}
    assert chunks_by_level([chunk(number) for number in range(65)], over=False)[16] == [tuple(range(64))]
    older = [chunk(number, attempt=1 + (number > 5)) for number in range(9)]
    assert chunks_by_level(older, over=False)[1] == [(0, 1, 2, 3), (4, 5)], "an older attempt has ended"


def test_chunks_without_layers_become_no_files():
    infos = [chunk(number) for number in range(9)]
    assert chunks_by_level(infos, over=True, without_layers=range(9)) == {}
    assert chunks_by_level(infos, over=False, without_layers={1}) == {1: [(4, 5, 6, 7)]}


def test_once_it_is_over_the_rest_does_and_the_chunk_without_coarse_levels_stands_alone():
    infos = [*(chunk(number) for number in range(10)), chunk(10, frozenset({1}))]
    archived = {(1, 1): {0, 1, 2, 3}}
    coarse = [tuple(range(10))]
    fine = [(4, 5, 6, 7), (8, 9), (10,)]
    assert chunks_by_level(infos, archived, over=True) == {1: fine, 16: coarse, 256: coarse}


def test_no_file_spans_chunks_that_stand_in_another():
    """Chunks before and behind an archived group became one file, which nobody may name, again and again."""
    infos = [chunk(0, frozenset({16, 256})), *(chunk(number) for number in range(1, 10))]
    archived = {(1, 1): {4, 5, 6, 7}}
    assert chunks_by_level(infos, archived, over=True)[1] == [(1, 2, 3), (8, 9)]
    held = {(1, 1): set(range(1, 10))}
    of_model = _due_of_model(infos[1:], held, {(1, model_level(1)): {4, 5, 6, 7}})
    assert [plan.chunks for plan in of_model] == [(1, 2, 3), (8,), (9,)]


@pytest.fixture(scope="module", params=["with checksums", "of before there were any"])
def written(tmp_path_factory, request):
    """(path, footer, totals by key [points, layers]) of a file of three row groups, the last one smaller."""
    path = tmp_path_factory.mktemp("archive") / "file.parquet"
    generator = np.random.default_rng(0)
    totals = {key: generator.normal(size=(POINTS, LAYERS)) for key in ("a", "b")}
    totals["b"][2, 3:6] = np.nan
    steps, times = np.arange(POINTS), np.linspace(1.7e9, 1.7e9 + 5, POINTS)
    points = PointRows({}, {}, steps, steps, times, np.ones(POINTS, np.int64), np.ones(POINTS, np.int64))
    held: dict[str, Any] = {"parts": (HeldPart(0, 0, POINTS),), "layers": LAYERS, "layers_a_group": A_GROUP}
    contents = Contents(run_id="r", attempt=1, level=1, **held)
    groups = (np.stack([*totals.values()])[:, :, start : start + A_GROUP] for start in range(0, LAYERS, A_GROUP))
    with pytest.MonkeyPatch.context() as then:
        if request.param != "with checksums":
            then.setattr(pyarrow.parquet, "ParquetWriter", without_checksums)
        footer = write_layers(path, contents, points, [f"layer.{i}" for i in range(LAYERS)], [*totals], groups)
    return path, Footer.of(footer), totals


@pytest.mark.parametrize(
    "layers",
    [range(LAYERS), [5], [10, 0, 4], [3, 4, 5, 6], [9, 11, 1], [11, 12], []],
    ids=["all", "one", "out of order", "over two groups", "one that it lacks", "only such", "none"],
)
@pytest.mark.parametrize("rows", [[Rows(0, 0, POINTS)], [Rows(1, 4, 2), Rows(5, 0, 3)]], ids=["all", "some"])
def test_layers_are_put_where_they_are_wanted(written, layers, rows):
    path, footer, totals = written
    layers = np.array([*layers], dtype=np.int64)
    found = {key: np.full((9, len(layers)), np.nan) for key in ("b", "a", "unknown")}
    expected = {key: values.copy() for key, values in found.items()}
    for key, values in totals.items():
        padded = np.concatenate([values, np.full((POINTS, 2), np.nan)], axis=1)
        for target, row, points in rows:
            expected[key][target : target + points] = padded[row : row + points, layers]
    with pyarrow.memory_map(str(path)) as source:
        read_layers(source, footer, layers, rows, found)
    for key, values in expected.items():
        assert found[key].tobytes() == values.tobytes(), key


def test_only_a_run_with_files_is_looked_for_among_them(tmp_path):
    """Every question about layers took one more statement, wherever its layers stood."""
    store = opened(tmp_path / "collage.sqlite", limits=None, archive=Folder(tmp_path / "archive"))
    counted: list[str] = []

    def ask():
        counted.clear()
        with store.points.snapshot() as snapshot:
            points = snapshot.points(["r"], ("lost",), Selection(by_layer=True))["r"]
        return len(counted), points.totals["lost"].tobytes()

    files, store.archiving = store.archiving, None
    filled(store, "r", 3, reports(3, 300, seed=0))
    event.listen(store.engine, "before_cursor_execute", lambda _c, _u, statement, *_: counted.append(statement))
    without, answer = ask()
    assert not [statement for statement in counted if "FROM segment" in statement and "min(" not in statement]
    store.archiving = files
    archive_all(store, "r")
    assert ask() == (without + 1, answer), "files and their footers; no rows of layers are left to be asked for"
    assert ask() == (without, answer), "footers are known by now"
    store.close()


def test_footers_in_memory_are_bounded_by_what_they_take(written, tmp_path, monkeypatch):
    """One of 4,000 layers of 12 statistics takes 15 MiB: 512 of them were kept."""
    path, footer, _ = written
    monkeypatch.setattr(archive_reader, "_KEPT_BYTES", 4 * footer.memory_bytes)
    store = opened(tmp_path / "collage.sqlite")
    data = read_footer(path)
    with store.writing() as connection:
        for chunk in range(20):
            file = ArchivedFile(f"{chunk}.parquet", 1, None)
            add_segment(connection, Segment("r", 1, 1, chunk, chunk, file, data), 0.0)
    reader = archive_reader.ArchiveReader(None)
    with store.reading() as connection:
        assert len(reader.find_segments(connection, 1, {("r", 1): range(20)})) == 20
    assert len(reader._footers) == 4
    store.close()


@pytest.mark.parametrize("rows", [1, 7, 2**15])
def test_logged_values_are_found_however_many_rows_a_group_had_when_they_were_written(tmp_path, monkeypatch, rows):
    """Files outlive the number: one that was read by today's would give a series the values of another."""
    sizes = {"loss": 5, "learning_rate": 3, "grad_norm": 12, "tokens": 1}
    series = tuple(LoggedSeries("s", name, count) for name, count in sizes.items())
    tables = [np.arange(3.0 * held.values).reshape(3, -1) + 100 * place for place, held in enumerate(series)]
    file = tmp_path / "logged.parquet"
    with monkeypatch.context() as then:
        then.setattr(logged_values, "_ROWS_A_GROUP", rows)
        write_logged(file, Contents(run_id="r", attempt=1, level=1, series=series), tables)
    footer = read_footer(file)
    for wanted in (series, series[2:3]):
        with pyarrow.OSFile(str(file)) as source:
            found = list(read_logged(source, Footer.of(footer), wanted))
        assert [held for held, _ in found] == list(wanted)
        for held, table in found:
            assert np.array_equal(table, tables[series.index(held)])


def test_the_columns_of_logged_values_are_those_of_files_that_exist():
    columns = {field.name: str(field.type) for field in logged_values._SCHEMA}
    assert [*columns] == ["stream", "name", "step", "time", "value"]
    assert [*columns.values()] == ["string", "string", "int64", "double", "double"]
