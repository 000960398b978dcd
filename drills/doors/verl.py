"""verl on the host: its own loading of plugins, its FSDP engine's optimizer step, and its tracking.

Its trainers want a device: the worker around the engine is a replica of its `update_actor`.
"""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

from drills.doors.door import STEPS, Door, Setting, Trained, digest, numbers_of, run, verdicts
from drills.doors.hugging_face import RATES, tiny_model

DOOR = Door(
    package="verl",
    version="0.9.1",
    lines="none: `COLLAGE_ATTACH=1` in the environment of its processes",
    seen="actor and critic, by role; what verl logs, in a run of the process that logs it",
    held_by="tests/integrations/test_verl.py",
    requirements=("verl==0.9.1",),
    part="its loading of plugins, its FSDP engine's step and its tracking",
)


class Worker:
    """verl's ActorRolloutRefWorker and TrainingWorker, as far as a step's callers are asked."""

    def __init__(self, setting: Setting) -> None:
        import torch
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        self.config = types.SimpleNamespace(model_type="language_model")
        self.engine: Any = object.__new__(FSDPEngine)
        self.engine.module = tiny_model(setting)
        self.engine.optimizer = torch.optim.AdamW(self.engine.module.parameters(), lr=RATES[setting])
        self.engine.optimizer_config = types.SimpleNamespace(clip_grad=1.0)
        self.engine._qat_enabled = False

    def update_actor(self, rows: Any) -> float:
        """One step of a policy gradient on random rewards."""
        import torch

        self.engine.optimizer.zero_grad()
        logits = self.engine.module(rows[:, :-1]).logits.float().log_softmax(-1)
        chosen = logits.gather(-1, rows[:, 1:, None]).squeeze(-1)
        loss = -(chosen * torch.randn(len(rows), 1)).mean()
        loss.backward()
        self.engine.optimizer_step()
        return float(loss.detach())


def train(setting: Setting, watched: bool, folder: Path) -> Trained:
    """A training as verl's worker does it; its `import verl` loads our plugin by itself."""
    if watched:
        os.environ["COLLAGE_ATTACH"] = "1"
    import torch
    import verl
    from verl.utils.tracking import Tracking

    worker, losses = Worker(setting), []
    tracking = Tracking("doors", "verl", default_backend="console")
    for step in range(STEPS):
        losses.append(worker.update_actor(torch.randint(0, 120, (4, 16))))
        tracking.log({"actor/pg_loss": losses[-1], "rollout_corr/k3_kl": 0.001}, step)
    assert verl.__version__.startswith(DOOR.version)
    engine = worker.engine
    return Trained(digest(numbers_of(engine.module, engine.optimizer), losses), STEPS, verdicts())


if __name__ == "__main__":
    run(train)
