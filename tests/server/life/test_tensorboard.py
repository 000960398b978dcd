"""TensorBoard event files as a run's logged scalars. Needs the extra `tensorboard`."""

from __future__ import annotations

import sys

import pytest

from collage_monitor.importing import ImportRefusal, read_events, send_source
from tests.server.life.bridge import transfer


def test_without_the_reader_it_says_what_to_install(tmp_path, monkeypatch):
    for name in ["tensorboard", *(name for name in sys.modules if name.startswith("tensorboard."))]:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    with pytest.raises(ImportRefusal, match=r"collage-monitor\[tensorboard\]"):
        read_events(tmp_path)


def test_a_folder_without_event_files_is_refused(tmp_path):
    with pytest.raises(ImportRefusal, match="no file called"):
        read_events(tmp_path)


@pytest.mark.slow
def test_scalars_of_event_files_arrive(server, tmp_path):
    event = pytest.importorskip("tensorboard.compat.proto.event_pb2", reason="the extra `tensorboard` is missing")
    summary = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    folder = tmp_path / "resnet"
    written = writer.EventFileWriter(str(folder))
    for step, loss in ((1, 4.0), (2, float("nan")), (3, 2.5), (3, 2.25)):
        values = [summary.Summary.Value(tag="loss", simple_value=loss)]
        values.append(summary.Summary.Value(tag="val/accuracy", simple_value=0.5 * step))
        written.add_event(event.Event(step=step, wall_time=1e9 + step, summary=summary.Summary(value=values)))
    written.close()
    with transfer(server) as client:
        run = send_source(client, read_events(folder), "p", "imported")
    assert (run.name, run.state) == ("resnet", "finished")
    series = server.series("loss", "imported", axis="time")
    assert (series.steps, series.positions) == ([1, 2, 3], [0.0, 1.0, 2.0])
    assert series.values == [4.0, "NaN", 2.25]
    assert server.series("val/accuracy", "imported").values == [0.5, 1.0, 1.5]
