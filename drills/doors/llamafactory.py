"""LLaMA-Factory's supervised training from a YAML file, by our command in the place of its own."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from drills.doors.door import Door, Setting, Trained, run
from drills.doors.hugging_face import arguments, left_by, saved_model

DOOR = Door(
    package="llamafactory",
    version="0.9.5",
    lines="`python -m collage_agent.integrations.llamafactory train.yaml`, or `run_exp(callbacks=[…])`",
    seen="the optimizer, all that the trainer logs",
    held_by="tests/integrations/test_hugging_face_house.py",
    requirements=("llamafactory==0.9.5",),
)


def _data(folder: Path) -> None:
    drawn = random.Random(0)
    rows = [
        {
            name: " ".join(f"w{drawn.randrange(120)}" for _ in range(6))
            for name in ("instruction", "input", "output")
        }
        for _ in range(48)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))


def train(setting: Setting, watched: bool, folder: Path) -> Trained:
    """As `llamafactory-cli train` does, or as ours does."""
    _data(folder)
    written: dict[str, Any] = arguments(setting, folder) | {
        "model_name_or_path": str(saved_model(setting, folder / "model")),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "pure_bf16": setting == "sick",
        "dataset": "rows",
        "dataset_dir": str(folder),
        "template": "empty",
        "cutoff_len": 32,
        "preprocessing_num_workers": 1,
        "overwrite_cache": True,
    }
    yaml = folder / "train.yaml"
    yaml.write_text(json.dumps(written))
    sys.argv[1:] = [str(yaml)]
    from llamafactory.hparams import parser
    from transformers import Trainer, TrainerCallback

    # It takes pure bf16 on a GPU alone; what it then trains is the same on a CPU.
    parser.is_torch_bf16_gpu_available = lambda: True
    kept: list[Any] = []
    ours: list[TrainerCallback] = []
    begin = Trainer.train

    def keeping(self: Any, *args: Any, **options: Any) -> Any:
        kept.append(self)
        ours.extend(one for one in self.callback_handler.callbacks if type(one).__name__ == "CollageCallback")
        return begin(self, *args, **options)

    Trainer.train = keeping
    if watched:
        from collage_agent.integrations.llamafactory import main

        main()
    else:
        from llamafactory.train.tuner import run_exp

        run_exp()
    return left_by(kept[0], ours)


if __name__ == "__main__":
    run(train)
