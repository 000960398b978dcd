"""A training, written as any user would: a small model (`models.py`), an optimizer, a loop, and `watch`.

The demo, the studies and benchmarks run it. Its draws are fixed by the seed: published pages rest on them
(`tests/demo/test_training.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

import collage_agent as collage
import torch
from collage_agent.transport import Transport
from collage_agent.watch_options import WatchArguments
from collage_optim import STRATEGIES, CollageAdamW
from torch import nn

from collage_demo.corpus import Corpus, batch, masked
from collage_demo.models import ByteBERT, ByteGPT, loss_of
from collage_demo.recipe import Plan, Recipe

__all__ = [
    "Build",
    "Outcome",
    "Progress",
    "TrainingLoop",
    "new_model",
    "new_model_and_optimizer",
    "new_optimizer",
    "train",
    "validate",
    "without_residuals",
]

Progress = Callable[[int, float, float], None]
"""Called with (step, loss, validation loss) at every validation."""
Build = Callable[[Plan, Recipe], tuple[nn.Module, Sequence[torch.optim.Optimizer]]]
"""Makes the model and what steps it; each group's `lr` is the rate that the recipe's schedule is a factor of."""
_VALIDATION_SEED = 10**9
_OF_TORCH = frozenset({"step", "exp_avg", "exp_avg_sq"})
"""States that torch's AdamW has, too."""
_PATIENCE_STEPS = 1000
"""After so many steps without an alert, such as on a server that evaluates none, the training ends."""


@dataclass(frozen=True)
class Outcome:
    """The facts about a run that only its training process knows. CPU time is the process's, without validation."""

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
    project: str = "demo",
    name: str | None = None,
    group: str | None = None,
    server_url: str | None = None,
    folder: Path | None = None,
    transport: Transport | None = None,
    loses_residuals: bool = False,
    build: Build | None = None,
    settings: Mapping[str, Any] | None = None,
    options: WatchArguments | None = None,
) -> Outcome:
    """Train the recipe under `plan` and watch it; reports go to `server_url`, or to `transport`.

    build: makes model and optimizers in place of `new_model_and_optimizer`; settings: further entries of the run's
    configuration; options: further options of `watch`.
    loses_residuals: in the middle it resumes from a checkpoint that kept only the states that torch's AdamW has. It
    ends some steps after the alert about it.
    """
    loop = TrainingLoop(plan, recipe, corpus, progress, build, options)
    with collage.init(
        project,
        name or plan.name,
        group=group,
        seed=recipe.seed,
        config={**asdict(recipe), **asdict(plan), **(settings or {})},
        server_url=server_url,
        dir=folder,
        transport=transport,
    ) as run:
        loop.watch(first_step=1)
        last = loop.lose_residuals() if loses_residuals else loop.take(range(1, recipe.steps + 1))
    return Outcome(
        run_id=run.run_id,
        steps=last,
        tokens_per_cpu_second=loop.taken * recipe.tokens_per_step / loop.clock.cpu_seconds,
        reports_sent=run.reports_sent,
        reports_dropped=sum(run.reports_dropped.values()),
    )


class TrainingLoop:
    """A training as it goes on: model, optimizers, schedule, and the steps taken."""

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        corpus: Corpus,
        progress: Progress,
        build: Build | None = None,
        options: WatchArguments | None = None,
    ) -> None:
        self.plan, self.recipe, self.corpus, self.progress = plan, recipe, corpus, progress
        self.options = options or {}
        self.model, self.optimizers = (build or new_model_and_optimizer)(plan, recipe)
        self.rates = [group["lr"] for group in self._groups()]
        self.clock = _Clock()
        self.taken = 0

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def watch(self, first_step: int) -> collage.Watch:
        """Watch the optimizers, whose next step is `first_step`."""
        # Without a governor all runs measure the same steps, so they can be compared.
        chosen: WatchArguments = {
            "strategy": self.plan.strategy if self.plan.strategy in STRATEGIES else None,
            "every": self.recipe.measure_every,
            "oracle": True,
            "windows": self.recipe.windows,
            "budget": None,
            "first_step": first_step,
        }
        chosen.update(self.options)
        return collage.watch(self.model, self.optimizers, **chosen)

    def take(self, steps: range, stop: Callable[[], bool] = lambda: False) -> int:
        """Take these steps, or up to the first after which `stop` holds; return the last one's number."""
        recipe, step = self.recipe, steps.start - 1
        for step in steps:
            factor = recipe.rate_factor(step - 1)
            with self.clock:
                for group, rate in zip(self._groups(), self.rates, strict=True):
                    group["lr"] = rate * factor
                seed = recipe.seed + step
                loss = loss_of(self.model, *_batch(self.corpus.training, recipe, seed))
                loss.backward()  # type: ignore[no-untyped-call]
                for optimizer in self.optimizers:
                    optimizer.step()
                self.model.zero_grad()
                self.taken += 1
                rate = recipe.learning_rate * factor
                collage.log({"loss": loss, "learning_rate": rate, "tokens": step * recipe.tokens_per_step})
            ends = step == steps[-1] or stop()
            if step % recipe.validate_every == 0 or ends:
                validation_loss = validate(self.model, recipe, self.corpus)
                speed = self.taken * recipe.tokens_per_step / self.clock.seconds
                collage.log({"validation_loss": validation_loss, "tokens_per_second": speed})
                self.progress(step, loss.item(), validation_loss)
            if ends:
                break
        return step

    def load(self, weights: dict[str, Any], states: dict[str, Any]) -> None:
        """Go on from a checkpoint of the usual training, with an optimizer of its own."""
        self.model.load_state_dict(weights)
        optimizer = new_optimizer(self.model, self.plan, self.recipe)
        optimizer.load_state_dict(states)
        self.optimizers = [optimizer]

    def lose_residuals(self) -> int:
        """Break off in the middle, resume without residuals, and end some steps after the alert has fired."""
        every, heard = self.recipe.measure_every, Event()
        resumed_at = every * max(self.recipe.steps // (2 * every), 1)
        self.take(range(1, resumed_at))
        (optimizer,) = self.optimizers
        weights, states = deepcopy(self.model.state_dict()), deepcopy(optimizer.state_dict())
        self.take(range(resumed_at, resumed_at + every))
        self.load(weights, without_residuals(states))
        self.watch(first_step=resumed_at)
        collage.on_alert(lambda _incident: heard.set(), every_seconds=1.0)
        last = self.take(range(resumed_at, resumed_at + _PATIENCE_STEPS), stop=heard.is_set)
        return self.take(range(last + 1, last + 1 + self.recipe.steps // 4))


def without_residuals(states: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state without the entries that torch's AdamW lacks, like a foreign checkpoint's."""
    kept = {
        index: {name: value for name, value in state.items() if name in _OF_TORCH}
        for index, state in states["state"].items()
    }
    return {**states, "state": kept}


def new_model_and_optimizer(plan: Plan, recipe: Recipe) -> tuple[ByteGPT, list[CollageAdamW]]:
    """The model and AdamW under the plan's strategy."""
    model = new_model(plan, recipe)
    return model, [new_optimizer(model, plan, recipe)]


def new_model(plan: Plan, recipe: Recipe) -> ByteGPT:
    """The model in the plan's dtype. All plans start from the same bfloat16 weights, float32 too."""
    torch.manual_seed(recipe.seed)
    kind = ByteBERT if recipe.model == "bert" else ByteGPT
    model = kind(layers=recipe.layers, width=recipe.width, length=recipe.length)
    return model.to(torch.bfloat16).to(getattr(torch, plan.dtype))


def new_optimizer(model: nn.Module, plan: Plan, recipe: Recipe) -> CollageAdamW:
    """AdamW under the plan's strategy on all that learns; in float32, `plain` is the usual AdamW."""
    return CollageAdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=recipe.learning_rate,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        strategy=plan.strategy,
    )


@torch.no_grad()
def validate(model: nn.Module, recipe: Recipe, corpus: Corpus) -> float:
    """Mean loss over fixed passages of the validation text, in the model's dtype. Synchronises."""
    batches = range(recipe.validation_batches)
    losses = [loss_of(model, *_batch(corpus.validation, recipe, _VALIDATION_SEED + index)) for index in batches]
    return torch.stack(losses).mean().item()


def _batch(text: torch.Tensor, recipe: Recipe, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = masked if recipe.model == "bert" else batch
    return draw(text, recipe.batch_size, recipe.length, seed)


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
