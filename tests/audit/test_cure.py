"""`collage-monitor cure`: checkpoints of real trainings are cured, and the steps that follow prove it or do not."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from collage_agent.audit import CheckpointError
from collage_agent.audit.cure import cure_checkpoint
from collage_agent.command.cure import cure
from collage_optim import MASTER_PARAMETER, CollageAdamW
from torch.distributed import run as torchrun

from tests.audit.checkpoints import hugging_face, saved, trained
from tests.launching.forked import forked_python
from tests.ports import free_port

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys
import torch
from tests.audit.checkpoints import network

model = network(torch.bfloat16)
optimizer = {optimizer}
{code}
path = {path}
if path:
    content = torch.load(path)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
generator = torch.Generator().manual_seed(10)
for step in range({steps}):
    inputs = torch.randn(16, 24, generator=generator).to(torch.bfloat16)
    loss = (model(inputs).float() - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained to the end")
"""
ADAMW = "torch.optim.AdamW(model.parameters(), lr={rate})"
LOSING = "plain bf16, which loses"
SICK = {
    LOSING: (ADAMW.format(rate=1e-5), None, "learning-rate-lost"),
    "states that are stuck": (ADAMW.format(rate=1e-3), "light", "second-moment-stuck"),
    "fp32 masters made anew": (ADAMW.format(rate=1e-5), "master-weights", "master-rounded"),
    "SGD with momentum": ("torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)", None, "single-weight"),
}
"""The optimizer of the program, the strategy under which it was saved, and what is found."""


def adamw(rate):
    return lambda model: torch.optim.AdamW(model.parameters(), lr=rate)


def sick_checkpoint(folder, kind=LOSING):
    text, strategy, _ = SICK[kind]

    def build(model):
        optimizer = eval(text, {"torch": torch, "model": model})
        return optimizer if strategy is None else CollageAdamW.from_optimizer(optimizer, strategy=strategy)

    model, optimizer = trained(build)
    if kind == "fp32 masters made anew":
        for parameter, state in optimizer.state.items():
            state[MASTER_PARAMETER] = parameter.detach().float()
    return saved(folder / "last.pt", model, optimizer)


def program(python, folder, checkpoint, code=None, **parts):
    """A training with the advised lines pasted, or others."""
    if code is None:
        code = cure_checkpoint(checkpoint, output=folder / "for-the-code.pt").code
    usual = {"optimizer": SICK[LOSING][0], "path": "sys.argv[1]", "steps": 60}
    script = folder / "train.py"
    script.write_text(PROGRAM.format(code=code, **usual | parts))
    return [python, str(script)]


def proven(checkpoint, command):
    """(exit status, what a check of the program says)."""
    answer = run(checkpoint, "--json", "--check", "--", *command, "{checkpoint}")
    assert "trained to the end" not in answer.output
    return answer.exit_code, json.loads(answer.stdout)


def run(*arguments):
    answer = CliRunner().invoke(cure, [str(argument) for argument in arguments])
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    return answer


@pytest.fixture(scope="module")
def python():
    """What the programs start by."""
    with forked_python() as path:
        yield path


@pytest.fixture(autouse=True)
def found_by_the_program(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath), prepend=os.pathsep)


@pytest.mark.parametrize("kind", SICK)
def test_a_sick_checkpoint_is_cured_and_twenty_steps_prove_it(kind, python, tmp_path):
    checkpoint = sick_checkpoint(tmp_path, kind)
    command = program(python, tmp_path, checkpoint, optimizer=SICK[kind][0])
    status, found = proven(checkpoint, command)
    assert (status, found["cured"]) == (0, True), found["failures"]
    assert SICK[kind][2] in {finding["code"] for finding in found["before"]}
    assert found["after"] == []
    (checked,) = found["checked"]
    # SGD counts no steps: a launch begins where the conversion does.
    assert (checked["steps"], checked["last_step"]) == (20, 21 if kind.startswith("SGD") else 32)
    assert checked["health"] == "healthy"
    assert checked["strategy"] == found["strategy"] == "split-master"


def test_the_words_say_before_what_to_paste_and_after(python, tmp_path):
    checkpoint = sick_checkpoint(tmp_path)
    command = program(python, tmp_path, checkpoint, path='os.environ["COLLAGE_CHECKPOINT"]')
    answer = run(checkpoint, "--steps", 5, "--check", "--", *command)
    assert answer.exit_code == 0, answer.output
    assert "problem: at learning rate 1e-05" in answer.output
    assert 'CollageAdamW.from_optimizer(optimizer, strategy="split-master")' in answer.output
    assert "steps up to 17: healthy." in answer.output
    assert answer.output.rstrip().endswith("cured: 5 steps prove it")


def test_without_a_check_it_is_converted_and_said_to_be_unproven(tmp_path):
    checkpoint = sick_checkpoint(tmp_path)
    answer = run(checkpoint, "--to", "plus", "--output", tmp_path / "new.pt")
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "new.pt").exists()
    assert 'strategy="plus"' in answer.output
    assert f"not proven yet: remove {tmp_path / 'new.pt'} and repeat the command with --check" in answer.output


def test_a_folder_is_cured_into_a_folder_beside_it(tmp_path):
    model, optimizer = trained(lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-5))
    folder = hugging_face(tmp_path / "run-1.5", model, optimizer)
    answer = run(folder)
    assert answer.exit_code == 0, answer.output
    cured, before = ({file.name for file in own.iterdir()} for own in (tmp_path / "run-1.5-cured", folder))
    assert cured == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_healthy_checkpoint_is_left_alone(dtype, tmp_path):
    make = adamw(1e-3)
    if dtype == torch.bfloat16:
        make = lambda model: CollageAdamW(model.parameters(), lr=1e-3, strategy="split-master")  # noqa: E731
    checkpoint = saved(tmp_path / "whole.pt", *trained(make, dtype=dtype))
    answer = run(checkpoint, "--check", "--", sys.executable, tmp_path / "never-started.py")
    assert answer.exit_code == 0, answer.output
    assert "nothing is kept too narrow; it is left as it is" in answer.output
    assert [file.name for file in tmp_path.iterdir()] == ["whole.pt"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "None"}, "it began after step 0, not after step 12: it did not load"),
        ({"steps": 7}, "the program took 7 of 20 steps"),
        ({"steps": 0}, "the program ended with status 0 before a step of an optimizer was measured"),
        ({"optimizer": "1 / 0"}, "the program ended with status 1 before a step of an optimizer was measured"),
    ],
    ids=["begun anew", "too short", "no step", "broken"],
)
def test_a_training_that_proves_nothing_fails(change, words, python, tmp_path):
    checkpoint = sick_checkpoint(tmp_path)
    command = program(python, tmp_path, checkpoint, **change)
    answer = run(checkpoint, "--check", "--", *command, "{checkpoint}")
    assert answer.exit_code == 1
    assert words in answer.output


def test_a_training_that_ignores_the_advice_is_told_that_it_loses(python, tmp_path):
    checkpoint = sick_checkpoint(tmp_path)
    command = program(python, tmp_path, checkpoint, code="", path=repr(str(checkpoint)))
    answer = run(checkpoint, "--check", "--", *command)
    assert answer.exit_code == 1
    assert "weights are kept as" in answer.output
    assert "the first steps are not healthy but losing updates" in answer.output


STATES_BY_NAME = """
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

def states_of(saved):
    names = [name for name, _ in model.named_parameters()]
    [group] = saved["param_groups"]
    options = {key: value for key, value in group.items() if key in optimizer.param_groups[0]}
    group = {**options, "params": [names[number] for number in group["params"]]}
    return {"state": {names[n]: state for n, state in saved["state"].items()}, "param_groups": [group]}

model = network"""


def test_a_step_before_the_checkpoint_is_loaded_does_not_count(python, tmp_path):
    """torch's set_optimizer_state_dict takes one with a rate of 0, so that there are states to load into."""
    checkpoint = sick_checkpoint(tmp_path)
    command = program(python, tmp_path, checkpoint)
    text = Path(command[-1]).read_text().replace("model = network", STATES_BY_NAME, 1)
    loaded = 'set_optimizer_state_dict(model, optimizer, states_of(content["optimizer"]))'
    Path(command[-1]).write_text(text.replace('optimizer.load_state_dict(content["optimizer"])', loaded))
    status, found = proven(checkpoint, command)
    assert status == 0, found["failures"]
    assert [(own["steps"], own["last_step"]) for own in found["checked"]] == [(20, 32)]


def test_damage_that_no_conversion_mends_is_not_called_cured(tmp_path):
    model, optimizer = trained(adamw(1e-3), dtype=torch.float32)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    answer = run(saved(tmp_path / "broken.pt", model, optimizer))
    assert answer.exit_code == 1
    assert "no conversion mends this: NaN or infinity in 1 tensors" in answer.output


def test_what_cannot_be_read_or_started_or_written_is_a_sentence(tmp_path):
    junk = tmp_path / "junk.pt"
    junk.write_bytes(b"no checkpoint")
    assert isinstance(CliRunner().invoke(cure, [str(junk)]).exception, CheckpointError)
    checkpoint = sick_checkpoint(tmp_path)
    answer = CliRunner().invoke(cure, [str(checkpoint), "--check", "--", str(tmp_path / "no-program")])
    assert "no-program: No such file or directory; pass a program" in str(answer.exception)
    answer = CliRunner().invoke(cure, [str(checkpoint)])
    assert "exists already: remove it, or name another path with --output" in str(answer.exception)
    answer = run(checkpoint, "--to", "nothing", "--output", tmp_path / "x.pt")
    assert (answer.exit_code, "--to" in answer.output) == (2, True)
    assert CliRunner().invoke(cure, [str(checkpoint), "--check"]).exit_code == 2


ON_TWO_RANKS = """
import os, sys
import torch
from collage_agent.optim import CollageAdamW
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from tests.audit.checkpoints import network

distributed.init_process_group("gloo")
model = network(torch.bfloat16)
content = torch.load(sys.argv[1])
model.load_state_dict(content["model"])
if os.environ["SPREAD"] == "shards":
    fully_shard(model)
    for number, own in enumerate(model.parameters()):
        state = content["optimizer"]["state"][number]
        for key in state.keys() - {"step"}:
            state[key] = distribute_tensor(state[key], own.device_mesh, own.placements, src_data_rank=None)
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = CollageAdamW(model.parameters(), lr=1e-5, strategy="split-master")
optimizer.load_state_dict(content["optimizer"])
if os.environ["LOSES"] == os.environ["RANK"]:
    optimizer.register_step_post_hook(lambda *_: [
        getattr(state["parameter_low"], "_local_tensor", state["parameter_low"]).zero_()
        for state in optimizer.state.values()
    ])
generator = torch.Generator().manual_seed(distributed.get_rank())
for step in range(60):
    inputs = torch.randn(16, 24, generator=generator).bfloat16()
    optimizer.zero_grad()
    (model(inputs).float() - 1).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.drawn
@pytest.mark.parametrize("loses", ["none", "1"])
@pytest.mark.parametrize("spread", ["replicas", "shards"])
def test_two_ranks_prove_it_and_each_is_heard(spread, loses, python, tmp_path, monkeypatch):
    checkpoint = sick_checkpoint(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(ON_TWO_RANKS)
    monkeypatch.setenv("SPREAD", spread)
    monkeypatch.setenv("LOSES", loses)
    launcher = [python, torchrun.__file__, "--nproc-per-node=2", f"--master-port={free_port()}", "--no-python"]
    status, found = proven(checkpoint, [*launcher, python, script])
    assert (status, found["cured"]) == ((0, True) if loses == "none" else (1, False)), found["failures"]
    for checked in found["checked"]:
        assert (checked["steps"], checked["last_step"], checked["strategy"]) == (20, 32, "split-master")
    health = {checked["rank"]: checked["health"] for checked in found["checked"]}
    assert health == {0: "healthy"} | ({1: "losing updates"} if loses == "1" else {})
    assert (found["failures"] != []) == (loses == "1")
    assert all(failure.startswith("rank 1: ") for failure in found["failures"])
