"""`check` on programs that know nothing of us, and on runs that were: status, JUnit, report; and the report on one
that never met a server."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import collage_agent as collage
import pytest
import torch
from click.testing import CliRunner
from collage_dashboard.html_report import report as rendered
from collage_dashboard.report_command import report
from collage_dashboard.server_reader import Reader

from collage_monitor.command.check import check
from collage_monitor.local import token_path
from collage_monitor.run_history import read_forecast
from collage_monitor.schedule import parse_schedule
from tests.agent import training
from tests.agent.training import mlp
from tests.end_to_end.trainings import train
from tests.launching.forked import forked_python

pytestmark = pytest.mark.slow

LOOP = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(30, 60), torch.nn.LayerNorm(60), torch.nn.Linear(60, 3)).{dtype}()
optimizer = torch.optim.AdamW(model.parameters(), lr={rate}, betas=(0.9, 0.95))
for step in range({steps}):
    optimizer.zero_grad()
    (model(torch.randn(16, 30).{dtype}()).float() - torch.randn(16, 3)).square().mean().backward()
    {before}
    optimizer.step()
print("trained to the end")
"""
TRAINER = """
import torch, transformers
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, place):
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": tokens, "labels": tokens}
if __name__ == "__main__":
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    options = transformers.TrainingArguments(
        output_dir=".", max_steps=400, per_device_train_batch_size=4, learning_rate=1e-3, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
    )
    transformers.Trainer(model, options, train_dataset=Data()).train()
    print("trained to the end")
"""
SICK = LOOP.format(rate=3e-5, dtype="bfloat16", steps=400, before="")
HEALTHY = LOOP.format(rate=1e-3, dtype="float", steps=400, before="")
CRASHING = LOOP.format(rate=1e-3, dtype="bfloat16", steps=400, before="if step == 20: raise KeyError('mine')")
SCHEDULE = "cosine:1e-3:10:2000"


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No server of this machine is found, and the programs have one thread."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def python():
    """What the programs start by."""
    with forked_python() as path:
        yield path


def flown(python, folder, text, *options, steps=40):
    script = folder / "train.py"
    script.write_text(text)
    written = {"--junit": folder / "junit.xml", "--report": folder / "report.html"}
    arguments = ["--json", "--steps", steps, *(part for pair in written.items() for part in pair), *options]
    answer = CliRunner().invoke(check, [*map(str, arguments), "--", python, str(script)])
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    (suite,) = ElementTree.parse(folder / "junit.xml").getroot().iter("testsuite")
    found = json.loads(answer.stdout)
    assert len(suite.findall("testcase")) == len(found["outcomes"])
    bad = [own for own in found["outcomes"] if own["status"] != "passed"]
    assert sum(int(suite.get(kind, "")) for kind in ("failures", "errors")) == len(bad)
    assert answer.exit_code == int(bool(bad))
    return found, {own["condition"]: own for own in found["outcomes"]}


def test_a_sick_loop_fails_with_its_verdict_and_its_forecast(python, tmp_path):
    options = ["--fail-if", "losing-updates", "--fail-if", "edq<0.5", "--fail-if", "forecast-lost>0.25"]
    found, of = flown(python, tmp_path, SICK, *options, "--schedule", "constant:3e-5:0:2000")
    (run,) = found["runs"]
    assert (run["name"], run["health"]) == ("train", "losing updates")
    assert [of[name]["status"] for name in ("program", "losing-updates", "forecast-lost>0.25")] == [
        "passed",
        "failed",
        "failed",
    ]
    own, *others = run["forecast"]["strategies"]
    assert (own["strategy"], own["onset"]) == ("plain", 41)
    assert {entry["strategy"]: entry["onset"] for entry in others}["split-master"] is None
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>train</h1>" in html
    assert own["text"] in html


def test_a_healthy_loop_that_really_starts_passes_and_is_ended_after_its_steps(tmp_path, capfd):
    found, of = flown(sys.executable, tmp_path, HEALTHY, "--fail-if", "problem", "--fail-if", "lost>0.25")
    assert {own["status"] for own in of.values()} == {"passed"}
    assert of["program"]["text"].endswith("last measured step is 40")
    printed = capfd.readouterr().err
    assert "trained to the end" not in printed
    assert "healthy" in printed
    assert "`collage-monitor sync`" not in printed, "the folder of its reports is gone afterwards"
    assert (tmp_path / "report.html").is_file()
    assert found["runs"][0]["forecast"] is None


@pytest.mark.nightly
def test_a_trainer_of_hugging_face_passes_and_is_ended(python, tmp_path, capfd):
    _, of = flown(python, tmp_path, TRAINER, "--fail-if", "losing-updates", steps=24)
    assert {own["status"] for own in of.values()} == {"passed"}
    assert "trained to the end" not in capfd.readouterr().err


def test_a_program_that_crashes_is_an_error_and_its_steps_are_judged(python, tmp_path):
    found, of = flown(python, tmp_path, CRASHING, "--fail-if", "not-finite")
    assert (of["program"]["status"], of["not-finite"]["status"]) == ("error", "passed")
    assert of["program"]["text"] == "it ended with status 1; its last measured step is 20"
    assert (tmp_path / "report.html").is_file()
    assert len(found["runs"]) == 1


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("print('no optimizer here')", (), "it ended well; no step of a torch optimizer was measured"),
        ("import time\ntime.sleep(1000)", ("--timeout", "1"), "it ran for 1 seconds without 40 steps"),
    ],
    ids=["never steps", "hangs"],
)
def test_a_program_without_a_step_is_an_error(python, tmp_path, text, options, said):
    # What hangs is ended with its process, so that it must have one of its own.
    found, of = flown(sys.executable if options else python, tmp_path, text, *options)
    assert found["runs"] == []
    assert of["program"]["status"] == "error"
    assert of["program"]["text"].startswith(said)
    assert not (tmp_path / "report.html").exists()


def test_what_cannot_be_asked_for_is_refused_before_anything_runs(tmp_path):
    answer = CliRunner().invoke(check, ["--fail-if", "forecast-lost>0.5", "--", "python", "none.py"])
    assert answer.exit_code == 2
    assert "needs --schedule" in answer.output
    answer = CliRunner().invoke(check, ["--", "no-such-program"])
    assert answer.exit_code == 1
    assert "pass a program that the shell finds" in answer.output


def test_over_http_the_forecast_is_that_of_the_training_itself(server, client):
    run = collage.init(project="p", name="foretold", server_url=server.url, dir=server.folder)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = collage.watch(model, optimizer, every=2, budget=None)
    training.train(model, optimizer, 120)
    own = handle.forecast("cosine:1e-2:0:2000")
    collage.finish()
    found = read_forecast(client, run.run_id, parse_schedule("cosine:1e-2:0:2000"))
    assert [entry.strategy for entry in found.strategies] == [entry.strategy for entry in own.strategies]
    assert found.strategies[0].onset is not None
    for there, here in zip(found.strategies, own.strategies, strict=True):
        assert (there.onset or 2000) == pytest.approx(here.onset or 2000, abs=20)
        assert there.first_in == here.first_in


def test_runs_are_checked_on_a_server_and_on_disk(server, tmp_path):
    done = train("--steps", 40, server_url=server.url, dir=server.folder, run_name="sent", every=1)
    assert done.status == 0, done.errors
    token = token_path(server.folder).read_text().strip()
    online = ["sent", "--server-url", server.url, "--token", token]
    done = train("--steps", 40, mode="offline", dir=tmp_path / "left", run_name="left", every=1)
    assert done.status == 0, done.errors
    (run_id,) = (path.name for path in (tmp_path / "left" / "spool").iterdir())
    offline = [run_id, "--offline", "--dir", str(tmp_path / "left")]
    junit = tmp_path / "junit.xml"
    foretold = ["--schedule", SCHEDULE, "--fail-if", "forecast-onset<0", "--fail-if", "edq<-10"]
    for where, also, failures in (
        (online, [], 0),
        (online, ["--fail-if", "edq>-10"], 1),
        (offline, ["--fail-if", "edq>-10"], 1),
    ):
        done = CliRunner().invoke(check, ["--json", "--junit", str(junit), *where, *foretold, *also])
        assert done.exit_code == failures, done.output
        (run,) = json.loads(done.stdout)["runs"]
        assert len(run["forecast"]["strategies"]) == 5
        (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
        assert (suite.get("tests"), suite.get("failures")) == (str(2 + len(also) // 2), str(failures))


def test_an_offline_run_is_reported_and_can_still_be_sent(tmp_path, monkeypatch):
    # A server that the environment names is not this one.
    monkeypatch.setenv("COLLAGE_SERVER_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("COLLAGE_TOKEN", "the-token-of-another-server-that-is-long-enough")
    done = train("--steps", 20, mode="offline", dir=tmp_path, run_name="far away", every=1)
    assert done.status == 0, done.errors
    before = {path: path.read_bytes() for path in (tmp_path / "spool").rglob("*.spool")}
    assert before
    written = tmp_path / "report.html"
    said = CliRunner().invoke(report, ["--offline", "--dir", str(tmp_path), "--output", str(written), "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.output)["runs"] == ["far away"]
    html = written.read_text(encoding="utf-8")
    assert "<h1>far away</h1>" in html
    assert "finished, step 20" in html
    assert "Updates lost by layer" in html
    assert {path: path.read_bytes() for path in (tmp_path / "spool").rglob("*.spool")} == before


def test_a_run_before_its_first_step_has_a_report(server, client):
    run = collage.init(project="p", name="new", server_url=server.url, dir=server.folder)
    collage.finish()
    assert "no measured step yet" in rendered(Reader(lambda: client), [run.run_id])
