"""A chart's numbers as a file: every stored point under the run's name, however the chart is thinned."""

import csv
from io import StringIO

import pytest
from collage_dashboard import number_downloads

from tests.dashboard.generated import GeneratedRun


def rows_of(answer):
    assert answer.status_code == 200, answer.text
    return list(csv.DictReader(StringIO(answer.text)))


@pytest.mark.slow
def test_all_points_of_a_thinned_chart_are_in_its_file_with_the_runs_name(server, http, monkeypatch):
    """The server answers 80 points of 320: in the file none is the mean of several steps."""
    monkeypatch.setattr(number_downloads, "_MOST_POINTS", 80)
    run = GeneratedRun("=a long run", "plus", steps=320, every=1)
    server.runs[run.run_id] = run
    answer = http.get(f"/numbers.csv?run={run.run_id}&metric=edq_ratio&metric=loss&layer=head.weight&from=11")
    assert "filename=collage-a-long-run-curves.csv" in answer.headers["Content-Disposition"].replace('"', "")
    rows = rows_of(answer)
    assert [row["step"] for row in rows] == [*map(str, range(11, 321))] * 2
    assert all(row["first_step"] == row["step"] for row in rows)
    assert {(row["run"], row["metric"], row["layer"]) for row in rows} == {
        ("'=a long run", "edq_ratio", "head.weight"),
        ("'=a long run", "loss", ""),
    }, "a spreadsheet takes no name for a formula; a logged scalar is of no layer"
    series = server.client().series(run.run_id, "edq_ratio", layer="head.weight", points=2000)
    known = dict(zip(series.steps, series.values, strict=True))
    assert [float(row["value"]) for row in rows[:310]] == [known[step] for step in range(11, 321)]


def test_a_heatmaps_file_has_every_layer_at_every_step(server, http):
    rows = rows_of(http.get("/numbers.csv?run=run-plain&metric=edq_ratio&by=layer"))
    found = server.client().heatmap("run-plain", "edq_ratio")
    cells = [
        (layer, step, value)
        for layer, line in zip(found.layers, found.values, strict=True)
        for step, value in zip(found.steps, line, strict=True)
    ]
    assert [(row["layer"], int(row["step"]), float(row["value"])) for row in rows] == cells


def test_a_comparisons_file_tells_its_runs_apart_and_a_refused_question_says_so(server, http):
    rows = rows_of(http.get("/numbers.csv?run=run-plus&run=run-plain&metric=validation_loss&axis=tokens"))
    assert [row["run"] for row in rows] == ["plus"] * 4 + ["plain"] * 4
    assert rows[0]["tokens"] == "102400.0"
    assert http.get("/numbers.csv?run=gone&metric=loss").status_code == 404
    assert http.get("/numbers.csv?run=run-plus").status_code == 404
    server.down = True
    assert http.get("/numbers.csv?run=run-plus&metric=loss").status_code == 502
