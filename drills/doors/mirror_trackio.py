"""trackio's own store on this machine, read back: the training's rows as they were logged, ours in a run beside."""

import os
import tempfile
from pathlib import Path

from drills.doors.mirrored import ROWS, checked_rows, inside, same_training, say, train

PACKAGES = ("trackio==0.43.0",)


def main():
    """The checks; a line for each. Run with the packages installed."""
    with tempfile.TemporaryDirectory() as folder, inside(folder):
        os.environ["TRACKIO_DIR"] = folder
        alone = train([], lambda step, row: None)
        _beside(alone)
        _broken(alone, Path(folder))


def _beside(alone):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run = trackio.init(project="door", name="theirs", group="pair", embed=False, auto_log_cpu=False)
    trained = train(["trackio"], lambda step, row: trackio.log(row), every=5)
    assert trackio.context_vars.current_run.get() is run
    trackio.finish()
    theirs, ours = (SQLiteStorage.get_logs("door", name) for name in ("theirs", "theirs-collage"))
    assert [row["own/step"] for row in theirs] == list(range(1, ROWS + 1))
    assert [row["step"] for row in theirs] == list(range(ROWS))
    assert not any(name.startswith("collage") for row in theirs for name in row)
    assert checked_rows(ours, trained, "step", "collage/") == len(trained.edq)
    assert same_training(alone, trained)
    say(f"trackio: {len(theirs)} of {ROWS} own rows, {len(ours)} of {len(trained.edq)} of ours")


def _broken(alone, folder):
    """Its files are gone half-way: trackio itself raises nothing then; training and reports go on."""

    def gone(step):
        if step == ROWS // 2:
            for path in folder.glob("*.db*"):
                path.unlink()

    trained = train(["trackio"], lambda step, row: None, every=50, after=gone)
    assert len(trained.edq) == ROWS // 50 + 1
    assert same_training(alone, trained)
    say(f"trackio, files lost at step {ROWS // 2}: {len(trained.edq)} reports; {trained.counts['trackio']}")


if __name__ == "__main__":
    main()
