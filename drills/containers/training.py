"""What runs in the training's container: a small model, each step of which is reported, until it is stopped."""

import signal
import sys
import threading

import collage_agent as collage
import torch
from torch import nn

__all__ = ["PROJECT", "RUN"]

PROJECT, RUN = "lab", "in a container"
_SECONDS_A_STEP = 0.25


def main():
    """Breaks an expectation from its first step on, for the alert; prints at its end how many steps it took."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    model = nn.Linear(64, 64).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    collage.init(PROJECT, RUN)
    collage.watch(model, optimizer, every=1, budget=None, expect="master-weights")
    steps = 0
    while not told.wait(_SECONDS_A_STEP):
        loss = model(torch.randn(8, 64, dtype=torch.bfloat16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        collage.log({"loss": loss})
        steps += 1
    collage.finish()
    sys.stdout.write(f"{steps}\n")


if __name__ == "__main__":
    main()
