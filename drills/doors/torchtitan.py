"""torchtitan's own trainer and command line, on the host, with its debug model and our override."""

from __future__ import annotations

import json
import os
import random
import types
from pathlib import Path
from typing import Any

from drills.doors.door import STEPS, Door, Setting, Trained, digest, numbers_of, run, verdicts

DOOR = Door(
    package="torchtitan",
    version="0.3.0",
    lines="`--override.imports=collage_agent.integrations.torchtitan.watched`",
    seen="each optimizer of its container, layers by their names in the model; not the loss",
    held_by="tests/integrations/test_containers.py",
    requirements=("torchtitan==0.3.0", "triton"),
    part="its trainer, on the host in a device's place",
)


def _config(**changes: Any) -> Any:
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.training.steps = STEPS
    config.training.local_batch_size, config.training.seq_len = 1, 32
    config.training.disable_cuda_graphs = True
    config.training.dtype = changes["dtype"]
    config.optimizer = default_adamw(lr=changes["lr"], fused=False)
    config.lr_scheduler.warmup_steps = 0
    config.lr_scheduler.decay_ratio = 0.0
    config.validator.enable = False
    return config


def sick() -> Any:
    """torchtitan's configuration of plain bf16 at a small rate."""
    return _config(dtype="bfloat16", lr=1e-5)


def healthy() -> Any:
    """The same in fp32."""
    return _config(dtype="float32", lr=8e-4)


def _host_as_device() -> None:
    """torchtitan knows accelerators only: the host in their place, with what it asks of a device."""
    import torch
    from torchtitan.tools import utils

    memory = types.SimpleNamespace(total_memory=2**30)
    host = types.SimpleNamespace(
        **{
            name: getattr(torch.cpu, name)
            for name in ("set_device", "synchronize", "current_device", "Event")
            if hasattr(torch.cpu, name)
        },
        device_count=lambda: 1,
        get_device_name=lambda device: "host",
        get_device_properties=lambda device: memory,
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    utils.device_type, utils.device_module = "cpu", host


def _host_kernels() -> None:
    """The compiled kernel that torchtitan sets when a model is built has no backward pass on the host."""
    import torch
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import FlexAttention

    def attention(q: Any, k: Any, v: Any, *, scale: float | None, enable_gqa: bool, **options: Any) -> Any:
        kernel = torch.nn.functional.scaled_dot_product_attention
        return kernel(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None

    FlexAttention._compiled_flex_attn = staticmethod(attention)
    # After the first step it waits for all ranks, by a device's number.
    utils.set_pg_timeouts = lambda **options: None


def _assets() -> None:
    """A byte tokenizer and a text, where the debug model expects torchtitan's own."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer, texts = Path("tests/assets/tokenizer"), Path("tests/assets/c4_test")
    for folder in (tokenizer, texts):
        folder.mkdir(parents=True)
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(special)
    made.save(str(tokenizer / "tokenizer.json"))
    named = {"bos_token": special[0], "eos_token": special[1]}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(named))
    drawn = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "it"]
    lines = [" ".join(drawn.choices(words, k=60)) for _ in range(200)]
    (texts / "data.json").write_text("\n".join(json.dumps({"text": line}) for line in lines))


def train(setting: Setting, watched: bool, folder: Path) -> Trained:
    """As `python -m torchtitan.train --module drills.doors.torchtitan --config SETTING` does."""
    _assets()
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    _host_as_device()
    from torchtitan.config import ConfigManager

    override = ["--override.imports=collage_agent.integrations.torchtitan.watched"] if watched else []
    seed = ["--debug.seed=5", "--debug.deterministic"]
    config = ConfigManager().parse_args(
        ["--module=drills.doors.torchtitan", f"--config={setting}", *override, *seed]
    )
    trainer = config.build()
    _host_kernels()
    trainer.train()
    [optimizer], [model] = trainer.optimizers.optimizers, trainer.model_parts
    return Trained(digest(numbers_of(model, optimizer)), trainer.step, verdicts())


if __name__ == "__main__":
    run(train)
