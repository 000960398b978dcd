"""The Hugging Face callback on a small real model: what it reports, and that it leaves the training alone."""

from typing import Any

import pytest
import torch
from collage_agent import current_run
from collage_agent.integrations.transformers import CollageCallback
from collage_agent.transport import MemoryTransport
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from tests.integrations.trainings import assert_same_training, begun, recorded, scalars_of, steps_of

pytestmark = pytest.mark.slow

STEPS = 24


class Losses(TrainerCallback):
    """Keeps what the trainer logs."""

    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **objects):
        self.values += [(key, logs[key]) for key in ("loss", "grad_norm", "eval_loss") if key in logs]


def trainer_for(folder, callbacks, **options):
    set_seed(11)
    size = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    # Dropout stays on: it would show a random state that the agent moved.
    model = GPT2LMHeadModel(GPT2Config(**size, eos_token_id=0, bos_token_id=0, loss_type="ForCausalLM"))
    rows = torch.randint(0, 64, (40, 16), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in rows]
    usual: dict[str, Any] = {"learning_rate": 1e-3, "save_strategy": "no", "max_steps": STEPS, "logging_steps": 4}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
        **usual | options,
    )
    model.to(torch.bfloat16)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)


def trained(folder, callback=None, **options):
    losses = Losses()
    trainer = trainer_for(folder, [losses, *([callback] if callback else [])], **options)
    trainer.train()
    optimizer = trainer.optimizer
    return recorded(trainer.model, getattr(optimizer, "optimizer", optimizer), losses.values)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"bf16": True}, marks=pytest.mark.nightly),
    ],
)
def test_training_is_bit_identical_with_and_without_the_callback(tmp_path, options):
    without = trained(tmp_path, **options)
    callback = CollageCallback(run_options={"mode": "offline"}, every=2, sample=512, oracle=True)
    with_callback = trained(tmp_path, callback, **options)
    assert_same_training(without, with_callback)
    assert callback.handles[0].summary()["model"]["edq_ratio"] is not None


def test_the_run_carries_steps_scalars_and_configuration(tmp_path, capsys):
    transport = MemoryTransport()
    callback = CollageCallback("words", "first", run_options={"transport": transport}, every=8)
    trained(tmp_path, callback, eval_strategy="steps", eval_steps=12)
    assert current_run() is None
    assert steps_of(transport) == [1, 8, 16, 24]
    scalars = scalars_of(transport)
    assert {step for step, _ in scalars["loss"]} == {4, 8, 12, 16, 20, 24}
    assert {step for step, _ in scalars["validation_loss"]} == {12, 24}
    assert {"learning_rate", "grad_norm_unclipped", "epoch"} <= scalars.keys()
    assert begun(transport).name == "first"
    assert begun(transport).config["learning_rate"] == 1e-3
    assert "step 24" in capsys.readouterr().out
    assert (callback.handles[0].info.optimizer, callback.handles[0].info.door) == ("AdamW", "transformers")


def test_steps_go_on_after_a_resume(tmp_path):
    callback = CollageCallback(run_options={"mode": "offline"}, every=4)
    trained(tmp_path, callback, max_steps=8, save_strategy="steps", save_steps=8)
    transport = MemoryTransport()
    again = CollageCallback(run_options={"transport": transport}, every=4)
    trainer_for(tmp_path, [again], max_steps=16).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert steps_of(transport) == [9, 12, 16]


def test_its_advice_is_in_the_trainer_s_words_and_cures(tmp_path):
    def judged(paste="", **options):
        callback = CollageCallback(run_options={"mode": "offline"}, every=1)
        trainer = trainer_for(tmp_path, [callback], max_steps=8, learning_rate=1e-5, **options)
        exec(paste, {"trainer": trainer})
        trainer.train()
        return callback.handles[0].judgement(), trainer.optimizer.param_groups

    sick, groups = judged(weight_decay=0.1)
    advice = sick.advice[0]
    assert sick.health == "losing updates"
    assert advice.text.startswith("try trainer.create_optimizer(); trainer.optimizer = ")
    assert advice.text.endswith("before trainer.train()")
    for choice in advice.choices:
        cured, own_groups = judged(choice.code, weight_decay=0.1)
        assert cured.health == "healthy", cured
        assert [group["weight_decay"] for group in own_groups] == [group["weight_decay"] for group in groups]
