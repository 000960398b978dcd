"""A plain torch loop: a byte-level language model in bfloat16, watched by three added lines.

python examples/torch_loop.py --steps 200
"""

import argparse
import inspect

import collage_agent as collage
import torch
from collage_demo.models import compute_products_in_fp32
from torch import Tensor, nn

CONTEXT = 64


class ByteModel(nn.Module):
    """Predicts the next byte from the bytes before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrence = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch][position][256] of the bytes that follow each of `tokens` [batch][position]."""
        hidden, _ = self.recurrence(self.embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits


def batch_of(text: Tensor, size: int = 8) -> Tensor:
    """Random windows of the text, [size][CONTEXT + 1]."""
    starts = torch.randint(0, len(text) - CONTEXT - 1, (size,))
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()


def main(arguments: list[str] | None = None) -> None:
    """Train on this machine's copy of a standard-library module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)

    text = torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8)
    model = compute_products_in_fp32(ByteModel().to(torch.bfloat16))  # most CPUs multiply bf16 slowly
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    collage.init(project="examples", name="torch loop", config=options)
    collage.watch(model, optimizer)
    for _ in range(options.steps):
        tokens = batch_of(text)
        logits = model(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        collage.log({"loss": loss})
    collage.finish()


if __name__ == "__main__":
    main()
