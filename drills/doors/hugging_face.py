"""What the doors of the Hugging Face house share: a tiny model, its settings, and what a trainer leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drills.doors.door import STEPS, Setting, Trained, digest, numbers_of

__all__ = ["arguments", "callbacks", "left_by", "saved_model", "tiny_model", "tiny_tokenizer"]

RATES: dict[Setting, float] = {"sick": 1e-5, "healthy": 1e-3}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny_model(setting: Setting) -> Any:
    """A random Llama of 30,000 weights, in plain bf16 or fp32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(11)
    config = LlamaConfig(
        **SIZES, num_key_value_heads=2, vocab_size=128, max_position_embeddings=128, bos_token_id=1, eos_token_id=2
    )
    return LlamaForCausalLM(config).to(torch.bfloat16 if setting == "sick" else torch.float32)


def tiny_tokenizer() -> Any:
    """One token a word, of 120 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {word: place for place, word in enumerate([*special, *(f"w{number}" for number in range(120))])}
    made = Tokenizer(models.WordLevel(vocab=words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return tokenizer


def saved_model(setting: Setting, folder: Path) -> Path:
    """The model and its tokenizer as files, for what starts from a path."""
    tiny_model(setting).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def arguments(setting: Setting, folder: Path) -> dict[str, Any]:
    """Of every trainer's configuration."""
    return {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "learning_rate": RATES[setting],
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 7,
    }


def callbacks(watched: bool) -> list[Any]:
    """Ours, or none."""
    if not watched:
        return []
    from collage_agent.integrations.transformers import CollageCallback

    return [CollageCallback("doors")]


def left_by(trainer: Any, ours: list[Any]) -> Trained:
    """What a trainer left after its training."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    logged = [
        {name: value for name, value in entry.items() if name in ("loss", "grad_norm")}
        for entry in trainer.state.log_history
    ]
    health = [handle.judgement().health for callback in ours for handle in callback.handles]
    return Trained(digest(numbers_of(trainer.model, optimizer), logged), trainer.state.global_step, health)
