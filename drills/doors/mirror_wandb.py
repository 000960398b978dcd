"""W&B's own offline store, read back: the training's rows as they were logged, ours in them or in a run beside."""

import json
import os
import struct
import tempfile
from pathlib import Path

from drills.doors.mirrored import ROWS, checked_rows, inside, kill, same_training, say, train
from tests.waiting import until

PACKAGES = ("wandb==0.31.0",)
_BLOCK, _HEADER = 32_768, 7


def main():
    """The checks; a line for each. Run with the packages installed."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off")
    alone = train([], lambda step, row: None)
    for style in (_commits, _numbers_its_steps, _commits_in_two_parts):
        _beside(alone, style)
    _in_a_run_of_its_own(alone)
    _killed(alone)


def _commits(run, step, row):
    run.log(row)


def _numbers_its_steps(run, step, row):
    run.log(row, step=10 * step)


def _commits_in_two_parts(run, step, row):
    run.log({"loss": row["loss"]}, commit=False)
    run.log({"own/step": row["own/step"]})


def _beside(alone, style):
    """At the default interval ours stand in the training's rows, which are as they are without us."""
    import wandb

    with tempfile.TemporaryDirectory() as folder, inside(folder):
        logged = []

        def log(step, row):
            logged.append(row)
            style(run, step, row)

        with wandb.init(project="door", dir=folder) as run:
            trained = train(["wandb"], log, every=10)
        (found,) = _runs(folder)
    rows = [row for row in found if "own/step" in row]
    assert [{name: row[name] for name in ("loss", "own/step")} for row in rows] == logged
    steps = [row["_step"] for row in rows]
    assert steps == (
        [10 * step for step in range(1, ROWS + 1)] if style is _numbers_its_steps else list(range(ROWS))
    )
    kept = checked_rows(found, trained, "collage/step", "collage/")
    # Those of the last half second, which no commit of the training comes after, share its last row.
    ours, measured = [row["collage/step"] for row in found if "collage/step" in row], sorted(trained.edq)
    assert ours == [*measured[: kept - 1], measured[-1]], set(measured) - set(ours)
    assert kept > len(measured) / 2
    assert same_training(alone, trained)
    say(f"wandb, {style.__name__.strip('_')}: {len(rows)} of {ROWS} own rows, {kept} of {len(trained.edq)} of ours")


def _in_a_run_of_its_own(alone):
    """Two runs in one group: each has all of its rows."""
    import wandb

    with tempfile.TemporaryDirectory() as folder, inside(folder):
        with wandb.init(project="door", group="pair", dir=folder) as run:
            trained = train(["wandb:own"], lambda step, row: run.log(row))
            assert wandb.run is run
        found = _runs(folder)
    (ours,) = (rows for rows in found if not any("own/step" in row for row in rows))
    (theirs,) = (rows for rows in found if rows is not ours)
    assert [row["own/step"] for row in theirs] == list(range(1, ROWS + 1))
    assert not any(name.startswith("collage") for row in theirs for name in row)
    assert checked_rows(ours, trained, "collage/step", "collage/") == ROWS
    assert same_training(alone, trained)
    say(f"wandb, own: {len(theirs)} of {ROWS} own rows, {len(ours)} of {ROWS} of ours")


def _killed(alone):
    """W&B's own process dies half-way: the training and its reports go on, and the mirror is given up."""
    with tempfile.TemporaryDirectory() as folder, inside(folder):
        killed = []
        trained = train(
            ["wandb:own"],
            lambda step, row: None,
            after=lambda step: killed.append(kill("wandb-core")) if step == ROWS // 2 else None,
        )
    assert killed == [1]
    assert len(trained.edq) == ROWS
    assert same_training(alone, trained)
    say(f"wandb, killed at step {ROWS // 2}: {len(trained.edq)} reports; {trained.counts['wandb']}")


def _runs(folder):
    """The rows of each offline run, once its file is whole: W&B writes on when `finish` has returned."""
    runs = list(Path(folder).glob("wandb/offline-run-*"))
    paths = [run / f"run-{run.name.rpartition('-')[2]}.wandb" for run in runs]
    until(
        lambda: all(path.exists() and "exit" in {kind for kind, _ in _records(path)} for path in paths),
        "whole files",
    )
    return [[row for kind, row in _records(path) if kind == "history"] for path in paths]


def _records(path):
    """(kind, row) of each message in an offline run's file."""
    from wandb.proto.wandb_internal_pb2 import Record

    for message in _messages(path):
        record = Record.FromString(message)
        items = record.history.item
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        yield record.WhichOneof("record_type"), row


def _messages(path):
    """The messages of the file: LevelDB's log format, in blocks, behind seven bytes of W&B's own."""
    data, place, parts = path.read_bytes(), _HEADER, []
    while place + _HEADER <= len(data):
        if _BLOCK - place % _BLOCK < _HEADER:
            place += _BLOCK - place % _BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        if place + _HEADER + size > len(data):
            return
        parts.append(data[place + _HEADER : place + _HEADER + size])
        place += _HEADER + size
        if kind in (1, 4):  # A whole message, or the last part of one.
            yield b"".join(parts)
            parts = []


if __name__ == "__main__":
    main()
