"""TRL's SFT, DPO and GRPO trainers with the Hugging Face callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drills.doors.door import Door, Setting, Trained, run
from drills.doors.hugging_face import arguments, callbacks, left_by, tiny_model, tiny_tokenizer

DOOR = Door(
    package="trl",
    version="1.16.0",
    lines='`callbacks=[CollageCallback("my-project")]` of SFTTrainer, DPOTrainer, GRPOTrainer',
    seen="the optimizer, all that the trainer logs; casts of the copies that GRPO sends",
    held_by="tests/integrations/test_transformers.py",
    requirements=("trl==1.16.0",),
)


def _rows(*names: str) -> Any:
    import random

    from datasets import Dataset

    drawn = random.Random(0)
    return Dataset.from_list(
        [{name: " ".join(f"w{drawn.randrange(120)}" for _ in range(12)) for name in names} for _ in range(48)]
    )


def _sft(setting: Setting, folder: Path, ours: list[Any]) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**arguments(setting, folder), max_length=32)
    model, tokenizer = tiny_model(setting), tiny_tokenizer()
    return SFTTrainer(model, args, train_dataset=_rows("text"), processing_class=tokenizer, callbacks=ours)


def _dpo(setting: Setting, folder: Path, ours: list[Any]) -> Any:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**arguments(setting, folder), max_length=32)
    data, tokenizer = _rows("prompt", "chosen", "rejected"), tiny_tokenizer()
    return DPOTrainer(
        tiny_model(setting),
        tiny_model(setting),
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=ours,
    )


def _grpo(setting: Setting, folder: Path, ours: list[Any]) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **options: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    args = GRPOConfig(**arguments(setting, folder), num_generations=4, max_completion_length=8)
    data, tokenizer = _rows("prompt"), tiny_tokenizer()
    return GRPOTrainer(
        tiny_model(setting), reward, args=args, train_dataset=data, processing_class=tokenizer, callbacks=ours
    )


def train(setting: Setting, watched: bool, folder: Path) -> Trained:
    """All three, one after the other."""
    left = []
    for make in (_sft, _dpo, _grpo):
        ours = callbacks(watched)
        trainer = make(setting, folder, ours)
        trainer.train()
        left.append(left_by(trainer, ours))
    return Trained(
        " ".join(one.digest for one in left),
        min(one.steps for one in left),
        [h for one in left for h in one.health],
    )


if __name__ == "__main__":
    run(train)
