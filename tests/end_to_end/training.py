"""A training as a user writes it, for tests that disturb it; prints what came of it as one line of JSON."""

import argparse
import hashlib
import json
import resource
import sys
import threading
from pathlib import Path

import collage_agent as collage
import torch
from torch import nn

__all__ = ["main"]


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--unwatched", action="store_true")
    parser.add_argument("--poison-from", type=int, default=10**9, help="first step with NaN and infinite numbers")
    parser.add_argument("--hold-at", type=int, help="step after which it waits to be killed")
    parser.add_argument(
        "--checkpoint", type=Path, help="written at step 20; where it exists training goes on from it"
    )
    parser.add_argument("--extra-scalars", type=int, default=0, help="logged at once after the last step")
    parser.add_argument("--file-bytes", type=int, help="no file may become longer")
    return parser.parse_args()


def poison(model):
    """NaN in a gradient, infinity in another, and both in parameters."""
    first, last = model[0], model[2]
    first.weight.grad[0, 0] = float("nan")
    last.weight.grad[0, 0] = float("inf")
    with torch.no_grad():
        first.bias[0] = float("inf")
        last.bias[0] = float("nan")


def train(options, model, optimizer, first_step):
    for step in range(first_step, options.steps + 1):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(16, 8, generator=generator).to(torch.bfloat16)
        loss = model(batch).float().square().mean()
        loss.backward()
        if step >= options.poison_from:
            poison(model)
        optimizer.step()
        optimizer.zero_grad()
        if not options.unwatched:
            collage.log({"loss": loss})
        if options.checkpoint and step == 20:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.checkpoint)
        sys.stdout.write(f"step {step}\n")
        sys.stdout.flush()
        if step == options.hold_at:
            threading.Event().wait()
    for number in range(options.extra_scalars):
        collage.log({"extra": float(number)}, step=options.steps + 1 + number)
    sys.stdout.write("all logged\n")
    sys.stdout.flush()


def main():
    options = arguments()
    if options.file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_bytes, options.file_bytes))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run, first_step = None, 1
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_step = 21
    if not options.unwatched:
        run = collage.init("faults")
        collage.watch(model, optimizer, every=1, budget=None)
    train(options, model, optimizer, first_step)
    collage.finish()
    content = b"".join(parameter.detach().view(torch.int16).numpy().tobytes() for parameter in model.parameters())
    outcome: dict[str, object] = {"weights": hashlib.sha256(content).hexdigest()}
    if run is not None:
        outcome |= {"sent": run.reports_sent, "spooled": run.reports_spooled, "dropped": run.reports_dropped}
    sys.stdout.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
