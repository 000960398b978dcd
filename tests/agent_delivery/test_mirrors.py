"""Mirrors: TensorBoard's real files read back; what fails or hangs is counted and left; training as without them.

The other trackers' own stores are read back by `drills/doors`, each in an environment of its own.
"""

import threading
from collections import Counter
from typing import Any, cast

import collage_agent as collage
import pytest
from collage_agent.mirrors import mirroring
from collage_agent.mirrors.mirroring import MirroredRun, MirrorEvent, Mirrors, OnsetFinder
from collage_agent.run_settings import read_settings
from collage_agent.transport import MemoryTransport
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from collage_monitor.extensions import extensions
from collage_monitor.wire import Incident
from drills.doors.mirrored import SERIES, same_training, train
from tests.waiting import until


def read_back(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def texts(events, name):
    return [entry.tensor_proto.string_val[0].decode() for entry in events.Tensors(f"{name}/text_summary")]


@pytest.mark.slow
def test_tensorboard_has_every_measured_step_and_the_training_s_thousand_rows(tmp_path):
    """As files on disk, with TensorBoard's own reader; the training's writer is in the folder above."""
    writer = SummaryWriter(tmp_path / "logs")
    alone = train([], lambda step, row: None, steps=100, every=2)
    rows = []

    def log(step, row):
        for part in range(10):
            rows.append((10 * step + part, row["loss"]))
            writer.add_scalar("loss", row["loss"], 10 * step + part)

    trained = train([f"tensorboard:{tmp_path / 'logs' / 'collage'}"], log, steps=100, every=2)
    writer.close()
    own = read_back(tmp_path / "logs").Scalars("loss")
    assert [(entry.step, pytest.approx(entry.value)) for entry in own] == rows
    assert len(rows) == 1000
    found = read_back(tmp_path / "logs" / "collage")
    edq = {entry.step: entry.value for entry in found.Scalars("collage/edq_ratio")}
    assert edq == pytest.approx(trained.edq, abs=1e-6)
    assert len(edq) == 51
    assert len(found.Tags()["scalars"]) <= SERIES
    assert "0.bias (EDQ 0.000)" in texts(found, "collage/worst_layers")[0]
    assert texts(found, "collage/run")[0].endswith(trained.run_id)
    assert trained.counts["tensorboard"] == mirroring.MirrorCounts(written=51)
    assert same_training(alone, trained)


def test_an_unwritable_folder_is_said_once_and_left(tmp_path, caplog, capsys):
    (tmp_path / "taken").write_text("a file")
    trained = train([f"tensorboard:{tmp_path / 'taken' / 'logs'}"], lambda step, row: None, steps=20)
    assert len(trained.edq) == 20
    counts = trained.counts["tensorboard"]
    assert (counts.written, counts.failed, counts.failed + counts.dropped, counts.left) == (0, 3, 20, True)
    said = [record.getMessage() for record in caplog.records if "mirror" in record.getMessage()]
    assert [("writing failed" in line, "given up after 3" in line) for line in said] == [
        (True, False),
        (False, True),
    ]
    assert "mirror tensorboard: 20 of 20 rows and events are missing there" in capsys.readouterr().err


class Double:
    """A tracker of the test's: notes what it is given, or does what it is told."""

    package = "collage_agent"

    def __init__(self, run):
        self.run, self.seen, self.threads = run, [], set()
        self.calls: Counter[str] = Counter()
        self.held, self.error = threading.Event(), None
        self.held.set()

    def find(self):
        self.calls["find"] += 1

    def _given(self, item):
        self.threads.add(threading.current_thread())
        self.held.wait()
        if self.error is not None:
            raise self.error
        self.seen.append(item)

    write = tell = _given

    def close(self):
        self.calls["close"] += 1


@pytest.fixture
def double(monkeypatch):
    """The mirror `double`, as another package would add it; the one that was made last."""
    made = []

    class Made(Double):
        def __init__(self, run):
            super().__init__(run)
            made.append(self)

    known = {**extensions("collage_agent.mirrors"), "double": Made}
    monkeypatch.setattr(mirroring, "extensions", lambda group: known)
    monkeypatch.setattr("collage_agent.run_settings.extensions", lambda group: known)
    return made


@pytest.fixture
def mirrors(double):
    return Mirrors(["double"], MirroredRun("r", "name", "p", None, lambda: "http://nowhere", threading.Event()))


def incident(step):
    told = {"alert": "CollageEdqLow", "severity": "warning", "source": "server", "state": "firing", "text": "low"}
    return Incident(incident_id=str(step), started_at=1.0, step=step, **cast(Any, told))


@pytest.mark.slow
def test_a_mirror_that_hangs_holds_up_neither_training_nor_reports_nor_another(double, tmp_path):
    def hold(step):
        if step == 10:
            double[0].held.clear()
        if step == 40:
            run = collage.current_run()
            assert run is not None
            written = run.mirrors.counts
            until(lambda: written["tensorboard"].written >= 39, "the other mirror has all but the open step")
            assert written["double"].written <= 10
            double[0].held.set()

    trained = train(["double", f"tensorboard:{tmp_path}"], lambda step, row: None, steps=40, after=hold)
    assert len(trained.edq) == 40
    assert {name: counts.written for name, counts in trained.counts.items()} == {"tensorboard": 40, "double": 40}


def test_one_failure_costs_one_row(double, mirrors):
    double[0].error = ConnectionError("away")
    mirrors.alert(incident(1))
    until(lambda: mirrors.counts["double"].failed == 1, "the failure is counted")
    double[0].error = None
    mirrors.alert(incident(2))
    until(lambda: mirrors.counts["double"].written == 1, "the next one is written")
    assert not mirrors.counts["double"].left


def test_everything_is_written_on_the_mirror_s_own_thread_in_order_and_closed(double):
    trained = train(["double"], lambda step, row: None, steps=30)
    (made,) = double
    assert [row.step for row in made.seen] == list(range(1, 31))
    assert all(len(row.values) <= SERIES and len(row.worst) == 3 for row in made.seen)
    assert made.threads.isdisjoint({threading.main_thread()})
    assert {thread.name for thread in made.threads} == {"collage-mirror-double"}
    assert (made.calls["find"], made.calls["close"]) == (2, 1)
    assert made.run.address().endswith(trained.run_id)


def test_a_full_queue_drops_the_oldest_and_counts(double, mirrors, monkeypatch):
    monkeypatch.setattr(mirroring, "_QUEUE_ITEMS", 5)
    double[0].held.clear()
    for step in range(20):
        mirrors.alert(incident(step))
    until(lambda: double[0].threads, "the first is being written")
    double[0].held.set()
    mirrors.close()
    until(lambda: double[0].calls["close"] == 1, "the mirror is closed")
    counts = mirrors.counts["double"]
    assert counts.written + counts.dropped == 20
    assert [event.step for event in double[0].seen][-1] == 19


def test_what_a_tracker_that_hangs_never_took_is_counted_at_the_end(double, mirrors):
    """Told was 0 failed and 0 dropped, and 21 rows were gone."""
    double[0].held.clear()
    for step in range(21):
        mirrors.alert(incident(step))
    until(lambda: double[0].threads, "the first is being written")
    mirrors.close()
    mirrors.join(deadline=0.0)
    assert list(mirrors.missing()) == ["mirror double: 21 of 21 rows and events are missing there"]
    double[0].held.set()
    until(lambda: double[0].calls["close"] == 1, "the mirror is closed")
    assert list(mirrors.missing()) == ["mirror double: 21 of 21 rows and events are missing there"]


@pytest.mark.slow
def test_an_onset_is_told_once_where_it_came():
    """EDQ falls after step 400; a run of 5,000 measured steps keeps few points, and finds the second fall, too."""
    finder, found = OnsetFinder(), []
    for step in range(10, 50_010, 10):
        edq = 1.0 if step <= 400 else 0.7 if step <= 30_000 else 0.3
        onset = finder.take(step, edq + 1e-4 * (step % 70))
        found += [onset] if onset else []
    assert len(found) == 2
    assert 400 <= found[0].last_before < found[0].first_changed <= 420
    assert found[1].last_before <= 30_000 < found[1].settled


def test_an_alert_becomes_an_event_where_there_are_mirrors(double):
    assert Mirrors().callbacks == []
    run = collage.init("p", mirrors=["double"], transport=MemoryTransport())
    (callback,) = run.mirrors.callbacks
    callback(incident(120))
    until(lambda: double[0].seen, "the event")
    assert double[0].seen == [MirrorEvent("alert", 120, 1.0, "CollageEdqLow (warning): low")]
    collage.finish()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nobody"], "mirrors='nobody': there are mlflow, tensorboard, trackio, wandb"),
        (["wandb"], "mirrors='wandb' needs wandb, which is not installed: pip install wandb"),
        ("wandb", "a list of at most 16 names"),
        ([3], "a list of at most 16 names"),
    ],
)
def test_what_cannot_be_mirrored_is_refused_at_init(given, said):
    with pytest.raises(ValueError, match="mirrors") as raised:
        read_settings({}, mirrors=given)
    assert said in str(raised.value)


def test_the_environment_names_mirrors_and_never_stops_a_training(caplog):
    assert read_settings({"COLLAGE_MIRRORS": "tensorboard:a/b, tensorboard"}).mirrors == (
        "tensorboard:a/b",
        "tensorboard",
    )
    assert read_settings({"COLLAGE_MIRRORS": "wandb"}).mirrors == ()
    assert "COLLAGE_MIRRORS ignored: mirrors='wandb' needs wandb" in caplog.text


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_offline_runs_are_mirrored_and_disabled_ones_are_not(double, mode, tmp_path):
    run = collage.init("p", mirrors=["double"], mode=mode, dir=tmp_path)
    assert list(run.mirrors.counts) == (["double"] if mode == "offline" else [])
    collage.finish()
