"""Accelerate: a loop with gradient accumulation; the tracker records, and one line watches.

accelerate launch examples/accelerate_loop.py --steps 200
"""

import argparse
import inspect

import torch
from accelerate import Accelerator
from collage_agent.integrations.accelerate import CollageTracker, watch_accelerated
from collage_demo.models import compute_products_in_fp32
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 16
WIDTH = 64


def main(arguments: list[str] | None = None) -> None:
    """Train on this machine's copy of a standard-library module; --steps counts optimizer steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)

    text = torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8).long()
    windows = text.unfold(0, CONTEXT + 1, 1)
    model = nn.Sequential(
        nn.Embedding(256, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, 256),
    ).to(torch.bfloat16)
    compute_products_in_fp32(model)  # most CPUs multiply bf16 slowly

    accelerator = Accelerator(gradient_accumulation_steps=2, log_with=CollageTracker("examples", "accelerate loop"))
    model, optimizer, data = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-4),
        DataLoader(TensorDataset(windows[:, :-1], windows[:, -1]), batch_size=16, shuffle=True),
    )
    accelerator.init_trackers("examples", vars(options))
    handle = watch_accelerated(accelerator, model, optimizer)
    for inputs, following in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs).float(), following)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.log({"loss": loss})
        if (handle.step or 0) >= options.steps:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
