"""The doors under DDP: `collage-monitor run`, Accelerate and the Hugging Face Trainer, two processes each."""

from __future__ import annotations

import json

import pytest
from torch.distributed import run as torchrun

from tests.integrations.identity import assert_same_training
from tests.launching.forked import forked_python
from tests.launching.programs import launched, python, write
from tests.parallel.integrations import ACCUMULATED, BATCHES
from tests.parallel.launch import launch
from tests.ports import free_port

pytestmark = pytest.mark.slow

# It leaves out the interpreter's teardown: torch's own threads sometimes abort it (SIGABRT), watched or not.
PROGRAM = """
import atexit, hashlib, json, os, sys
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

def train():
    torch.manual_seed(0)
    own = torch.nn.Sequential(torch.nn.Linear(30, 80), torch.nn.Dropout(0.1), torch.nn.Linear(80, 3)).bfloat16()
    model = DistributedDataParallel(own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(distributed.get_rank())
    for step in range(12):
        optimizer.zero_grad()
        (model(torch.randn(16, 30).bfloat16()).float() - 1).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]:
        digest.update(tensor.detach().double().numpy().tobytes())
    return digest.hexdigest()

distributed.init_process_group("gloo")
told = {"rank": distributed.get_rank(), "digest": train()}
if os.environ.get("COLLAGE_ATTACH"):
    from collage_agent import current_run
    (watched,) = [slot.watch for slot in current_run()._slots.values()]
    layout = watched._last.layout
    told |= {
        "run": current_run().run_id,
        "step": watched.step,
        "replicas": {layer.name: layer.replica for layer in layout.layers},
        "totals": watched._last.table()["intended_effective_sum"].tolist(),
    }
with open(f"{sys.argv[1]}-{distributed.get_rank()}.json", "w") as file:
    json.dump(told, file)
distributed.barrier()
distributed.destroy_process_group()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def told_by(folder, name):
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.nightly
def test_a_program_under_run_and_torchrun_reports_its_replicas_and_trains_the_same(tmp_path):
    script = write(tmp_path, PROGRAM)
    options = ["--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port"]
    # Ranks know each other by their launcher, which is the parent of those alone that really start.
    program = python("-m", "torch.distributed.run", *options, free_port(), script, tmp_path / "watched")
    answer = launched(tmp_path, *program, options=["--every", 4])
    assert answer.returncode == 0, answer.stderr
    with forked_python() as forked:
        program = [forked, torchrun.__file__, *options, free_port(), "--no-python", forked]
        answer = launched(tmp_path, *program, script, tmp_path / "plain", watched=False)
    assert answer.returncode == 0, answer.stderr
    plain, watched = told_by(tmp_path, "plain"), told_by(tmp_path, "watched")
    assert [rank["digest"] for rank in watched] == [rank["digest"] for rank in plain]
    assert "run" not in plain[0]
    assert watched[0]["run"] == watched[1]["run"]
    for rank, seen in enumerate(watched):
        assert seen["step"] == 12
        assert seen["replicas"] == dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), rank)
        assert seen["totals"] == watched[0]["totals"]


@pytest.mark.parametrize(
    ("integration", "steps", "layers"),
    [pytest.param("accelerate", BATCHES // ACCUMULATED, 4, marks=pytest.mark.nightly), ("transformers", 8, None)],
)
def test_a_framework_s_ranks_report_their_replicas_to_one_run(integration, steps, layers, tmp_path):
    ranks = launch(f"integrations.{integration}", 2, tmp_path)
    assert ranks[0][True]["run"] == ranks[1][True]["run"]
    for rank, seen in enumerate(ranks):
        assert_same_training(seen[False]["training"], seen[True]["training"])
        told = seen[True]
        assert told["rank"] == told["stream"].rank == rank
        assert told["stream"].world_size == 2
        assert told["steps"] == [1, *range(2, steps + 1, 2)]
        assert layers is None or len(told["stream"].layers) == layers
        assert {layer.replica for layer in told["stream"].layers} == {rank}
        assert not any(layer.name.startswith("module.") for layer in told["stream"].layers)
        assert told["totals"] == ranks[0][True]["totals"]
        assert ("loss" in told["scalars"]) == (rank == 0)
