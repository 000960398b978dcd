"""MLflow's own file store, read back: the training's metrics as they were logged, ours beside them in its run."""

import os
import tempfile

from drills.doors.mirrored import ROWS, checked_rows, inside, same_training, say, train

PACKAGES = ("mlflow-skinny==3.17.2",)


def main():
    """The checks; a line for each. Run with the packages installed."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    alone = train([], lambda step, row: None)
    _in_the_active_run(alone)
    _in_a_run_of_its_own(alone)
    _broken(alone)


def _in_the_active_run(alone):
    import mlflow

    with tempfile.TemporaryDirectory() as folder, inside(folder):
        mlflow.set_tracking_uri(f"file:{folder}/mlruns")
        with mlflow.start_run() as active:
            trained = train(["mlflow"], lambda step, row: mlflow.log_metrics(row, step=step), every=5)
        own, ours = _rows(active.info.run_id)
        tags = mlflow.get_run(active.info.run_id).data.tags
    assert [row["own/step"] for row in own] == list(range(1, ROWS + 1))
    assert [row["step"] for row in own] == list(range(1, ROWS + 1))
    assert checked_rows(ours, trained, "step", "collage/") == len(trained.edq)
    assert "(EDQ " in tags["collage.worst_layers"]
    assert trained.run_id in tags["collage.address"]
    assert same_training(alone, trained)
    say(f"mlflow, active run: {len(own)} of {ROWS} own rows, {len(ours)} of {len(trained.edq)} of ours")


def _in_a_run_of_its_own(alone):
    import mlflow

    with tempfile.TemporaryDirectory() as folder, inside(folder):
        mlflow.set_tracking_uri(f"file:{folder}/mlruns")
        trained = train(["mlflow"], lambda step, row: None, every=50)
        experiment = mlflow.get_experiment_by_name("door").experiment_id
        (run,) = mlflow.MlflowClient().search_runs([experiment])
        _, ours = _rows(run.info.run_id)
    assert run.info.status == "FINISHED"
    assert checked_rows(ours, trained, "step", "collage/") == len(trained.edq)
    assert same_training(alone, trained)
    say(f"mlflow, own run: {len(ours)} of {len(trained.edq)} of ours")


def _broken(alone):
    """The store is gone half-way, and a file stands in its place: the mirror is given up, the training goes on."""
    import shutil
    from pathlib import Path

    import mlflow

    def gone(step):
        if step == ROWS // 2:
            shutil.rmtree("mlruns", ignore_errors=True)
            Path("mlruns").write_text("")

    with tempfile.TemporaryDirectory() as folder, inside(folder):
        mlflow.set_tracking_uri(f"file:{folder}/mlruns")
        trained = train(["mlflow"], lambda step, row: None, every=5, after=gone)
    assert trained.counts["mlflow"].left
    assert len(trained.edq) == ROWS // 5 + 1
    assert same_training(alone, trained)
    say(f"mlflow, store lost at step {ROWS // 2}: {len(trained.edq)} reports; {trained.counts['mlflow']}")


def _rows(run_id):
    """The rows of the training and ours, by step."""
    import mlflow

    client = mlflow.MlflowClient()
    own: dict[int, dict] = {}
    ours: dict[int, dict] = {}
    for key in client.get_run(run_id).data.metrics:
        rows = ours if key.startswith("collage/") else own
        for metric in client.get_metric_history(run_id, key):
            rows.setdefault(metric.step, {"step": metric.step})[key] = metric.value
    return [[rows[step] for step in sorted(rows)] for rows in (own, ours)]


if __name__ == "__main__":
    main()
