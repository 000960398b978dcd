"""Import: a run made of an export answers every question as the old one does; CSV and TensorBoard files arrive."""

import re
import sys
from pathlib import Path

import httpx
import pytest

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.errors import ServerRefusal
from collage_monitor.importing import ImportRefusal, new_run_id, read_curves, read_events, read_lines, send_source
from tests.server.samples import report
from tools.static_demo import KEPT, made

README = (Path(__file__).parents[3] / "README.md").read_text()
ROWS = re.findall(r"^\| ([\w-]+) \| (float32|bfloat16) \| (.*) \| [^|]* \|$", README, re.MULTILINE)
METRICS = ("edq_ratio", "edq_oracle_ratio", "state_decrement_ratio/exp_avg_sq", "lost_update_ratio")


def transfer(server):
    """A client that speaks to this server."""
    return Client("http://127.0.0.1", transport=server.transport())


def export_to(server, path, **more):
    with transfer(server) as client, client.export("r1", "jsonl", **more) as stream:
        path.write_bytes(b"".join(stream.parts))
    return path


def taken_in(server, path, run_id="again", project="q"):
    with transfer(server) as client:
        return send_source(client, read_lines(path), project, run_id)


@pytest.fixture
def two_ranks(server):
    """Two ranks that share the layers as shards, an older attempt in part hidden, odd scalars."""
    server.run(name="original", tags=["a", "b"], notes="n", seed=7, config={"width": 128}, group="g")
    server.attempt()
    server.stream()
    server.reports([report(i, step) for i, step in enumerate(range(10, 60, 10))])
    server.attempt(launch_id="launch-2", first_step=31)
    for rank in (0, 1):
        server.stream(stream_id=f"t{rank}", launch_id="launch-2", rank=rank, world_size=2)
        server.reports([report(i, step, rank=rank) for i, step in enumerate(range(40, 90, 10))], f"t{rank}")
    odd = {"loss": float("nan"), "gradient_noise": float("-inf")}
    server.reports([report(20, 85, measured=False, scalars=odd)], "t0")
    return server


@pytest.fixture
def path(two_ranks, tmp_path):
    """Its export."""
    return export_to(two_ranks, tmp_path / "r1.jsonl")


@pytest.mark.slow
def test_a_round_trip_keeps_every_number_and_a_second_one_stores_nothing_twice(two_ranks, path):
    taken_in(two_ranks, path)
    run = taken_in(two_ranks, path)
    streams = two_ranks.get("/runs/again/streams", wire.StreamList).streams
    assert [(stream.stream_id, stream.reports) for stream in streams] == [("again:import", 9)]
    old = two_ranks.get("/runs/r1", wire.Run)
    assert (run.project, run.state, run.name, run.run_id) == ("q", "finished", "original", "again")
    said = ("tags", "notes", "seed", "config", "group", "watch")
    for field in (*said, "latest", "scalars", "first_step", "last_step"):
        assert getattr(run, field) == getattr(old, field), field
    curves = ["loss", "gradient_noise", "lost_update_ratio&layer=blocks.1.weight"]
    curves += [f"edq_ratio{more}" for more in ("", "&axis=time", "&axis=tokens", "&points=3")]
    others = ("heatmap?metric=edq_ratio", "histogram", "worst", "layers")
    for question in (*(f"series?metric={curve}" for curve in curves), *others):
        answers = [two_ranks.client.get(f"/api/v1/runs/{run_id}/{question}").json() for run_id in ("r1", "again")]
        for answer in answers:
            if isinstance(answer, dict):
                for name in ("run_id", "ranks", "expected_ranks", "world_size"):
                    answer.pop(name, None)
        assert answers[0] == answers[1], question


@pytest.mark.slow
def test_a_run_that_is_no_import_is_left_alone(two_ranks, path):
    before = two_ranks.get("/runs/r1")
    with pytest.raises(ImportRefusal, match="'r1' is there and no import"):
        taken_in(two_ranks, path, "r1", "p")
    assert two_ranks.get("/runs/r1") == before
    with pytest.raises(ServerRefusal, match="another project"):
        taken_in(two_ranks, path, "r1", "q")


@pytest.mark.slow
def test_lines_of_single_ranks_stay_in_the_file(two_ranks, tmp_path):
    path = export_to(two_ranks, tmp_path / "r1.jsonl", ranks=True)
    assert b'"kind":"rank"' in path.read_bytes()
    assert taken_in(two_ranks, path).latest == two_ranks.get("/runs/r1", wire.Run).latest


@pytest.mark.slow
def test_it_is_closed_from_the_start_and_failed_until_it_is_whole(two_ranks, path):
    seen = []

    def look(_):
        seen.append(two_ranks.get("/runs/again", wire.Run).state)
        assert 'run_id="again"' not in two_ranks.get("/metrics")

    with transfer(two_ranks) as client:
        assert send_source(client, read_lines(path), "q", "again", look).state == "finished"
    assert seen == ["failed"]


@pytest.mark.slow
def test_a_busy_server_is_asked_again(two_ranks, path):
    network, refused = two_ranks.transport(), list[httpx.Request]()

    def busy(request):
        if request.method != "POST" or len(refused) == 3:
            return network.handler(request)
        refused.append(request)
        busy = {"error": {"code": "busy", "message": "wait"}}
        return httpx.Response(503, headers={"Retry-After": "0"}, json=busy)

    with Client("http://127.0.0.1", transport=httpx.MockTransport(busy)) as client:
        assert send_source(client, read_lines(path), "q", "again").state == "finished"
    assert len(refused) == 3


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "garbled", "miscounted"])
def test_a_damaged_file_is_refused_and_its_run_is_not_taken_for_whole(two_ranks, path, damage):
    lines = path.read_text().splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if line.startswith('{"kind":"step"'))
    left, told = {
        "cut": (lines[:-2], "no end line"),
        "garbled": ([*lines[:last], f"{lines[last][:40]}\n", *lines[last + 1 :]], "cannot be read"),
        "miscounted": ([*lines[:last], *lines[last + 1 :]], "8 are there"),
    }[damage]
    path.write_text("".join(left))
    with pytest.raises(ImportRefusal, match=told):
        taken_in(two_ranks, path)
    if damage != "cut":
        assert two_ranks.get("/runs/again", wire.Run).state == "failed"


def test_another_version_and_other_files_are_refused(path):
    text = path.read_text()
    for changed, told in (
        (text.replace('"version":1', '"version":2', 1), "version 2"),
        (text.replace('"elements":128', '"elements":"x"'), "a layer cannot be read"),
        ('{"kind":"end"}\n', "does not describe a run"),
    ):
        path.write_text(changed)
        with pytest.raises(ImportRefusal, match=told):
            read_lines(path)


def test_curves_of_a_csv_file(server, tmp_path):
    path = tmp_path / "curve.csv"
    path.write_text("Wall time,Step,Value,val\n1700000000,1,4.5,\n1700000010,2,nan,3.25\n\n1700000020,3.0,inf,\n")
    with transfer(server) as client:
        run = send_source(client, read_curves(path, rename={"Value": "loss"}), "p", "curve")
    assert (run.name, run.state) == ("curve", "finished")
    series = server.series("loss", "curve", axis="time")
    assert (series.steps, series.positions) == ([1, 2, 3], [0.0, 10.0, 20.0])
    assert series.values == [4.5, "NaN", "Infinity"]
    assert server.series("val", "curve").values == [3.25]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,2\n", "no column 'step', only 'a', 'b'"),
        ("step\n1\n", "no column beside steps"),
        ("step,loss,loss\n1,2,3\n", "2 columns 'loss'"),
        (",step,loss\n0,1,2\n", "a column of the name ''"),
        ("step,verlust_ü\n1,2\n".encode("latin-1"), "no CSV file in UTF-8"),
        ("step,loss\n1," + 200_000 * "1", "no CSV file in UTF-8 .field larger"),
        ("step,loss\n1,x\n", "line 2, column 'loss': 'x' is not a number"),
        ("step,loss\n1.5,2\n", "'1.5' is no step"),
        ("step,loss\n1,2,3\n", "line 2 has 3 cells"),
        ("step,first_step,time,ranks,layer,loss\n", "--format jsonl"),
        ("", "no column 'step'"),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_said(tmp_path, text, expected):
    path = tmp_path / "curve.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ImportRefusal, match=expected):
        list(read_curves(path).reports)


def test_new_names_of_columns_are_checked(tmp_path):
    path = tmp_path / "curve.csv"
    path.write_text("step,loss,Value\n1,2,3\n")
    with pytest.raises(ImportRefusal, match="2 columns 'loss'"):
        read_curves(path, rename={"Value": "loss"})
    with pytest.raises(ImportRefusal, match="no column 'Valeu' to rename, only 'step', 'loss', 'Value'"):
        read_curves(path, rename={"Valeu": "loss"})


@pytest.mark.slow
def test_a_step_with_more_names_than_one_report_may_log(server, tmp_path):
    server.filled(steps=[1, 2])
    for seq, letter in enumerate("ab", start=2):
        scalars = {f"{letter}{number}": float(number) for number in range(150)}
        server.reports([report(seq, 1, measured=False, scalars=scalars)])
    path = export_to(server, tmp_path / "r1.jsonl")
    for _ in range(2):
        assert taken_in(server, path, project="a?b").scalars == server.get("/runs/r1", wire.Run).scalars
    assert server.series("edq_ratio", "again").values == server.series("edq_ratio").values


def test_run_ids_are_new_sortable_and_accepted(server):
    ids = [new_run_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert ids[0][:9] <= ids[-1][:9]
    assert server.run(ids[0]).run_id == ids[0]


def test_without_event_files_or_their_reader_it_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ImportRefusal, match="no file called"):
        read_events(tmp_path)
    for name in ["tensorboard", *(name for name in sys.modules if name.startswith("tensorboard."))]:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    with pytest.raises(ImportRefusal, match=r"collage-monitor\[tensorboard\]"):
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


def close(cell, value):
    """Whether a cell of the README is this value, rounded as it is."""
    number = cell.removeprefix("< ").removesuffix(" %")
    scale = 100 if cell.endswith("%") else 1
    if cell.startswith("<"):
        return value * scale < float(number)
    return value * scale == pytest.approx(float(number), abs=0.51 * 10.0 ** -len(number.partition(".")[2]))


@pytest.mark.slow
def test_the_page_of_the_demo_says_what_the_readme_says(server):
    with transfer(server) as client:
        page = made(client)
        names = {run.run_id: run.name for run in client.runs().runs}
        compared = {names[run.run_id]: run for run in client.compare(list(names), "edq_ratio").runs}
    assert not re.search(r"<script|<link|(?:src|href)=\"http", page)
    assert len(ROWS) == len(list(KEPT.glob("*.jsonl.gz"))) == 5
    for strategy, dtype, cells in ROWS:
        name, (loss, *told) = f"{strategy} {dtype}", cells.split(" | ")
        assert name in page
        found = compared[name]
        assert close(loss, found.scalars["validation_loss"].value), name
        for metric, cell in zip(METRICS, told, strict=True):
            assert close(cell, found.merged[metric]), (name, metric, cell, found.merged[metric])
