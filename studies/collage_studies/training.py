"""A training of the demo, written as any user would: a model, an optimizer, a loop, and `watch`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import collage_agent as collage
import torch
from collage_agent.optim import CollageAdamW
from collage_agent.transport import Transport
from torch.optim.lr_scheduler import LambdaLR

from collage_studies.corpus import Corpus, batch
from collage_studies.model import ByteGPT, loss_of
from collage_studies.recipe import Plan, Recipe

__all__ = ["Outcome", "Progress", "train"]

Progress = Callable[[int, float, float], None]
"""Called with (step, loss, validation loss) at every validation."""
_VALIDATION_SEED = 10**9


@dataclass(frozen=True)
class Outcome:
    """What only the training process knows of its run. CPU time is the process's, without validation."""

    run_id: str
    steps: int
    tokens_per_cpu_second: float
    reports_sent: int
    reports_dropped: int


def train(
    plan: Plan,
    recipe: Recipe,
    corpus: Corpus,
    progress: Progress,
    *,
    group: str | None = None,
    server_url: str | None = None,
    folder: Path | None = None,
    transport: Transport | None = None,
) -> Outcome:
    """Train the recipe under `plan` and watch it; reports go to `server_url`, or to `transport`."""
    model = new_model(plan, recipe)
    optimizer = new_optimizer(model, plan, recipe)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.warm_up_steps))
    config = {**asdict(recipe), **asdict(plan)}
    clock = _Clock()
    with collage.init(
        "demo",
        plan.name,
        group=group,
        seed=recipe.seed,
        config=config,
        server_url=server_url,
        dir=folder,
        transport=transport,
    ) as run:
        # Without a governor all runs measure the same steps, so they can be compared.
        collage.watch(
            model, optimizer, strategy=plan.strategy, every=recipe.measure_every, oracle=True, budget=None
        )
        for step in range(1, recipe.steps + 1):
            with clock:
                loss = loss_of(model, *batch(corpus.training, recipe.batch_size, recipe.length, recipe.seed + step))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                rate = schedule.get_last_lr()[0]
                schedule.step()
                collage.log({"loss": loss, "learning_rate": rate, "tokens": step * recipe.tokens_per_step})
            if step % recipe.validate_every == 0 or step == recipe.steps:
                validation_loss = validate(model, recipe, corpus)
                speed = step * recipe.tokens_per_step / clock.seconds
                collage.log({"validation_loss": validation_loss, "tokens_per_second": speed})
                progress(step, loss.item(), validation_loss)
    return Outcome(
        run_id=run.run_id,
        steps=recipe.steps,
        tokens_per_cpu_second=recipe.steps * recipe.tokens_per_step / clock.cpu_seconds,
        reports_sent=run.reports_sent,
        reports_dropped=sum(run.reports_dropped.values()),
    )


def new_model(plan: Plan, recipe: Recipe) -> ByteGPT:
    """The model in the plan's dtype. All plans start from the same bfloat16 weights, float32 too."""
    torch.manual_seed(recipe.seed)
    model = ByteGPT(layers=recipe.layers, width=recipe.width, length=recipe.length)
    return model.to(torch.bfloat16).to(getattr(torch, plan.dtype))


def new_optimizer(model: ByteGPT, plan: Plan, recipe: Recipe) -> CollageAdamW:
    """AdamW under the plan's strategy; in float32, `plain` is the usual AdamW."""
    return CollageAdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        strategy=plan.strategy,
    )


@torch.no_grad()
def validate(model: ByteGPT, recipe: Recipe, corpus: Corpus) -> float:
    """Mean loss over fixed passages of the validation text, in the model's dtype. Synchronises."""
    batches = range(recipe.validation_batches)
    losses = [
        loss_of(model, *batch(corpus.validation, recipe.batch_size, recipe.length, _VALIDATION_SEED + index))
        for index in batches
    ]
    return torch.stack(losses).mean().item()


class _Clock:
    """Counts seconds, and CPU seconds of the whole process with the agent, while the context is open."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self._start = (0.0, 0.0)

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start[0]
        self.cpu_seconds += time.process_time() - self._start[1]
