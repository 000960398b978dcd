"""docs/how-to/long-jobs.md, to the letter: the job, the page without a server, reports sent later."""

import os
import subprocess
import sys

import pytest

from collage_monitor.client import Client
from tests.docs.blocks import blocks
from tests.end_to_end.servers import KillableServer
from tests.launching.forked import forked_python

pytestmark = pytest.mark.slow
PAGE = "how-to/long-jobs.md"
TRAINING = """
import torch
model = torch.nn.Linear(32, 32).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(30):
    model(torch.randn(4, 32).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def python():
    """What `python` is on the node."""
    with forked_python() as path:
        yield path


@pytest.fixture
def node(python, tmp_path):
    """A folder with a training and the programs that the page calls; SLURM's `srun` starts one task here."""
    (tmp_path / "train.py").write_text(TRAINING)
    programs = tmp_path / "bin"
    programs.mkdir()
    command = "from collage_monitor.command import main; main()"
    for name, words in {
        "srun": 'exec "$@"',
        "python": f'exec {python} "$@"',
        "collage-monitor": f"exec {sys.executable} -c '{command}' \"$@\"",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{words}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "HOME": str(tmp_path),
        "SLURM_JOB_NAME": "finetune",
        "SLURM_JOB_ID": "17",
    }

    def call(script, **more):
        text = script.replace("/shared/collage", str(tmp_path / "shared"))
        done = subprocess.run(
            ["sh", "-euc", text],
            cwd=tmp_path,
            env={**environment, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


def test_a_job_without_a_network_is_seen_later(node, tmp_path):
    _, job, page, send = blocks(PAGE, "sh")
    assert "losing updates" in node(job)
    assert list((tmp_path / "shared" / "spool" / "finetuning-17").iterdir())
    node(page)
    assert [path.suffix for path in tmp_path.glob("*.html")] == [".html"]
    server = KillableServer(tmp_path / "data", tmp_path / "server.log")
    server.start()
    try:
        token = (tmp_path / "data" / "token").read_text().strip()
        node(send.replace("https://monitor.example:7420", server.url).replace("…", token))
        with Client(server.url, token) as client:
            run = client.run("finetuning-17")
            assert (run.project, run.name) == ("finetuning", "finetune-17")
            assert client.latest("finetuning-17").step == 30
    finally:
        server.kill()
