"""Hugging Face Trainer: a small GPT-2 in bfloat16, watched by one callback.

python examples/transformers_trainer.py --steps 200
"""

import argparse
import inspect
import tempfile

import torch
from collage_agent.integrations.transformers import CollageCallback
from collage_demo.models import compute_products_in_fp32
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CONTEXT = 64


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of a text, byte by byte."""

    def __init__(self, text: str) -> None:
        self.text = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


def main(arguments: list[str] | None = None) -> None:
    """Train on this machine's copy of a standard-library module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)

    size = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, eos_token_id=0, bos_token_id=0
    )
    model = compute_products_in_fp32(GPT2LMHeadModel(size).to(torch.bfloat16))  # most CPUs multiply bf16 slowly
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=2e-4,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        callback = CollageCallback("examples", "transformers trainer")
        Trainer(model, training, train_dataset=Windows(inspect.getsource(argparse)), callbacks=[callback]).train()


if __name__ == "__main__":
    main()
