"""README and docs/how-to: the lines that adopt our optimizers train with them: in a loop, a Trainer, Lightning."""

import os

import pytest
import torch
from collage_agent.optim import CollageAdamW

from tests.docs.blocks import blocks
from tests.forking import TRAINING, run_forked
from tools.release import BEFORE, quick_start

pytestmark = pytest.mark.slow
PAGE = "how-to/choose-a-strategy.md"


def ran(code, **given):
    namespace = {"torch": torch, **given}
    exec(compile(code, PAGE, "exec"), namespace)
    return namespace


def test_the_lines_for_a_loop_step_and_keep_what_a_bf16_weight_cannot_hold():
    model = torch.nn.Linear(8, 8).bfloat16()
    build, wrap = blocks(PAGE)[3:5]
    first = ran(build, model=model)["optimizer"]
    wrapped = ran(wrap, model=model, CollageAdamW=CollageAdamW)
    assert first.strategy == wrapped["optimizer"].strategy == "split-master"
    assert wrapped["scheduler"].optimizer is wrapped["optimizer"]
    optimizer = first
    before = optimizer.stored_parameter(model.weight).clone()
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    optimizer.step()
    assert (optimizer.stored_parameter(model.weight) != before).all()


def test_the_readmes_first_lines_end_with_a_verdict(tmp_path):
    (tmp_path / "train.py").write_text(BEFORE + quick_start())
    environment = {**os.environ, "HOME": str(tmp_path), "COLLAGE_MODE": "offline"}
    done = run_forked(TRAINING, "train.py", folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "losing updates" in done.stdout


def test_the_readmes_cure_takes_the_readers_optimizer():
    model = torch.nn.Linear(8, 8).bfloat16()
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
    entry = torch.arange(8)
    trainer = ran(
        blocks(PAGE)[5], model=model, arguments=arguments, data=[{"input_ids": entry, "labels": entry}] * 4
    )["trainer"]
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert isinstance(inner, CollageAdamW)
    assert trainer.state.global_step == 2
    trainer.optimizer = None
    ran(blocks(PAGE)[6], trainer=trainer, CollageAdamW=CollageAdamW)
    assert isinstance(trainer.optimizer, CollageAdamW)
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.0, 0.0]


@pytest.mark.nightly
def test_lightning_takes_it():
    pytest.importorskip("lightning")
    kind = ran(blocks(PAGE)[7])["Model"]
    model = kind()
    model.layer = torch.nn.Linear(8, 8).bfloat16()
    assert isinstance(model.configure_optimizers(), CollageAdamW)


def test_the_lines_that_resume_take_torchs_states():
    model = torch.nn.Linear(8, 8).bfloat16()
    other = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    other.step()
    checkpoint = {"optimizer": other.state_dict()}
    optimizer = ran(blocks(PAGE)[8], model=model, checkpoint=checkpoint)["optimizer"]
    assert optimizer.strategy == "split-master"
    assert optimizer.state[model.weight]["step"] == 1
