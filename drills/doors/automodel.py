"""NeMo Automodel's builder of optimizers, given a dotted name as its YAML files give it; the loop is ours."""

from __future__ import annotations

from pathlib import Path

from drills.doors.door import STEPS, Door, Setting, Trained, digest, numbers_of, run
from drills.doors.hugging_face import tiny_model

DOOR = Door(
    package="nemo-automodel",
    version="0.7.0",
    lines="`optimizer._target_: collage_agent.optim.CollageAdamW`; watched by `collage-monitor run`",
    seen="the optimizer and its strategy; not the loss",
    held_by="tests/integrations/test_hugging_face_house.py",
    requirements=("nemo_automodel==0.7.0",),
    part="its builder of optimizers",
)


def train(setting: Setting, watched: bool, folder: Path) -> Trained:
    """Plain bf16 by torch's AdamW, or bf16 weights that ours complete: the cure, by a line of YAML."""
    import torch
    from nemo_automodel.components.optim.optimizer import build_optimizer

    model = tiny_model("sick")
    target = "torch.optim.AdamW" if setting == "sick" else "collage_agent.optim.CollageAdamW"
    options = {"lr": 1e-5} | ({} if setting == "sick" else {"strategy": "split-master"})
    [optimizer] = build_optimizer(model, (target, options))
    handle = None
    if watched:
        import collage_agent

        collage_agent.init("doors")
        handle = collage_agent.watch(model, optimizer)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        rows = torch.randint(0, 120, (4, 16))
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    health = [] if handle is None else [str(handle.judgement().health)]
    return Trained(digest(numbers_of(model, optimizer), losses), STEPS, health)


if __name__ == "__main__":
    run(train)
