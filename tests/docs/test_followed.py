"""Pages followed to the letter: the lines that adopt our optimizers train, the tutorial cures, recipes run one
after the other, and a job without a network is seen later."""

import os
import re
import subprocess
import sys

import pytest
import torch
from collage_agent.optim import CollageAdamW

from collage_monitor import wire
from collage_monitor.client import Client
from tests.docs.blocks import DOCS, blocks, outputs
from tests.end_to_end.servers import KillableServer
from tests.forking import TRAINING, command, run_forked
from tests.launching.forked import forked_python
from tests.server.samples import report, stream_create
from tests.waiting import until
from tools.release import BEFORE, quick_start

pytestmark = pytest.mark.slow
LINES = "how-to/choose-a-strategy.md"


def ran(code, **given):
    namespace = {"torch": torch, **given}
    exec(compile(code, LINES, "exec"), namespace)
    return namespace


def narrow_layer():
    return torch.nn.Linear(8, 8).bfloat16()


def test_the_lines_for_a_loop_step_and_keep_what_a_bf16_weight_cannot_hold():
    model = narrow_layer()
    build, wrap = blocks(LINES)[3:5]
    optimizer = ran(build, model=model)["optimizer"]
    wrapped = ran(wrap, model=model, CollageAdamW=CollageAdamW)
    assert optimizer.strategy == wrapped["optimizer"].strategy == "split-master"
    assert wrapped["scheduler"].optimizer is wrapped["optimizer"]
    before = optimizer.stored_parameter(model.weight).clone()
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    optimizer.step()
    assert (optimizer.stored_parameter(model.weight) != before).all()


def call(folder, line, **environment):
    """What a line of a page prints, with this environment's Python."""
    first, *rest = line.split()
    words = rest if first == "python" else command(*rest)[1:]
    given = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", **environment}
    done = run_forked(TRAINING, *words, folder=folder, environment=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readmes_first_lines_end_with_a_verdict(tmp_path):
    (tmp_path / "train.py").write_text(BEFORE + quick_start())
    assert "losing updates" in call(tmp_path, "python train.py", COLLAGE_MODE="offline")


def test_the_readmes_cure_takes_the_readers_optimizer():
    model = narrow_layer()
    _, cure = blocks("../README.md")
    optimizer = ran(cure, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5))["optimizer"]
    assert optimizer.strategy == "split-master"
    assert optimizer.param_groups[0]["lr"] == 1e-5


@pytest.mark.nightly
def test_the_hugging_face_trainer_trains_with_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    size = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(size).to(torch.bfloat16)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, learning_rate=1e-5, report_to="none", use_cpu=True, disable_tqdm=True
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    trainer = ran(blocks(LINES)[5], model=model, arguments=arguments, data=data)["trainer"]
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert isinstance(inner, CollageAdamW)
    assert trainer.state.global_step == 2
    trainer.optimizer = None
    ran(blocks(LINES)[6], trainer=trainer, CollageAdamW=CollageAdamW)
    assert isinstance(trainer.optimizer, CollageAdamW)
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.0, 0.0]


@pytest.mark.nightly
def test_lightning_takes_it():
    pytest.importorskip("lightning")
    kind = ran(blocks(LINES)[7])["Model"]
    model = kind()
    model.layer = narrow_layer()
    assert isinstance(model.configure_optimizers(), CollageAdamW)


def test_the_lines_that_resume_take_torchs_states():
    model = narrow_layer()
    other = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    other.step()
    checkpoint = {"optimizer": other.state_dict()}
    optimizer = ran(blocks(LINES)[8], model=model, checkpoint=checkpoint)["optimizer"]
    assert optimizer.strategy == "split-master"
    assert optimizer.state[model.weight]["step"] == 1


def test_the_tutorial_leads_from_losing_updates_to_healthy(tmp_path):
    page = "tutorials/sick-to-cured.md"
    training, cure = blocks(page)
    _, train, audit, convert, resume = [code.strip() for code in blocks(page, "sh")]
    sick, paste, healthy = outputs(page)
    marker = "# The cure goes here.\n"
    assert marker in training
    (tmp_path / "train.py").write_text(training)
    said = call(tmp_path, train)
    assert said.startswith(sick.rstrip()), said
    assert "second-moment" in call(tmp_path, f"{audit} --json")
    assert paste.strip() in call(tmp_path, convert)
    (tmp_path / "train.py").write_text(training.replace(marker, cure))
    assert (tmp_path / "last-cured.pt").exists()
    said = call(tmp_path, resume)
    assert said.startswith(healthy.rstrip()), said


@pytest.fixture
def served(tmp_path):
    """The address of a server on a folder, and its token."""
    server = KillableServer(tmp_path / "data", tmp_path / "server.log")
    server.start()
    yield server.url, (tmp_path / "data" / "token").read_text().strip()
    server.kill()


@pytest.fixture
def filled(served, tmp_path, monkeypatch):
    """A server's folder, with four runs of a sweep; this process finds it as a reader's would."""
    for name, value in zip(("COLLAGE_SERVER_URL", "COLLAGE_TOKEN"), served, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with Client() as client:
        for number in range(4):
            run_id = f"RUN{number or ''}"
            own: dict = {"name": f"seed {number}", "seed": number, "config": {"learning_rate": 1e-4}}
            client.create_run("sweep", wire.RunCreate(run_id=run_id, **own))
            client.create_attempt(run_id, wire.AttemptCreate(launch_id="l", first_step=1))
            stream = client.create_stream(run_id, stream_create(f"s{number}", launch_id="l"))
            reports = [report(seq, 10 * (seq + 1)) for seq in range(40)]
            client.send_reports(stream.stream_id, wire.ReportBatch(reports=reports))
        until(lambda: {row["health"] for row in client.runs_frame().to_pylist()} == {"losing updates"}, "judging")
    return tmp_path


def test_every_recipe_runs_and_shows_what_it_promises(filled, capsys):
    page = (DOCS / "how-to/export-and-import.md").read_text()
    assert len(re.findall(r"^### \d+\. ", page, re.MULTILINE)) == 10
    namespace: dict = {}
    said = []
    try:
        for code in blocks("how-to/export-and-import.md"):
            exec(compile(code, "export-and-import.md", "exec"), namespace)
            said.append(capsys.readouterr().out)
        assert len(said) == 11
        assert "seed 3" in said[1]
        assert "0.0001" in said[2]
        assert re.search(r"plain\s+\S+\s+\S+\s+4", said[3]), "one strategy, four seeds"
        assert "400" in said[4]
        assert "embedding.weight" in said[6]
        assert "RUN3" in said[7]
        assert (filled / "sweep.parquet").stat().st_size > 1000
        assert namespace["found"].headline in said[9]
        assert {tuple(run.tags) for run in namespace["client"].runs().runs} == {("look at this",)}
    finally:
        namespace["client"].close()


LONG_TRAINING = """
import torch
model = torch.nn.Linear(32, 32).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(30):
    model(torch.randn(4, 32).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def node(tmp_path):
    """A folder with a training and the programs that the page calls; SLURM's `srun` starts one task here."""
    (tmp_path / "train.py").write_text(LONG_TRAINING)
    programs = tmp_path / "bin"
    programs.mkdir()
    code = "from collage_monitor.command import main; main()"
    own = {"HOME": str(tmp_path), "SLURM_JOB_NAME": "finetune", "SLURM_JOB_ID": "17"}
    environment = {**os.environ, **own, "PATH": f"{programs}:{os.environ['PATH']}"}

    def call(script):
        text = script.replace("/shared/collage", str(tmp_path / "shared"))
        asked = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(["sh", "-euc", text], text=True, check=False, **asked)
        assert done.returncode == 0, done.stdout
        return done.stdout

    with forked_python() as python:
        called = {"srun": "", "python": python, "collage-monitor": f"{sys.executable} -c '{code}'"}
        for name, program in called.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            (programs / name).chmod(0o755)
        yield call


def test_a_job_without_a_network_is_seen_later(node, request, tmp_path):
    _, job, page, send = blocks("how-to/long-jobs.md", "sh")
    assert "losing updates" in node(job)
    assert list((tmp_path / "shared" / "spool" / "finetuning-17").iterdir())
    node(page)
    assert [path.suffix for path in tmp_path.glob("*.html")] == [".html"]
    url, token = request.getfixturevalue("served")
    node(send.replace("https://monitor.example:7420", url).replace("…", token))
    with Client(url, token) as client:
        run = client.run("finetuning-17")
        assert (run.project, run.name) == ("finetuning", "finetune-17")
        assert client.latest("finetuning-17").step == 30
