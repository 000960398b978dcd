"""A training, written as any user would: a small byte-level GPT or BERT, an optimizer, a loop, and `watch`.

The models have learned positions, pre-norm blocks, and an output matrix that is not tied.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import collage_agent as collage
import torch
from collage_agent.optim import CollageAdamW
from collage_agent.transport import Transport
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from collage_studies.corpus import NO_TARGET, Corpus, batch, masked
from collage_studies.recipe import Plan, Recipe

__all__ = ["ByteBERT", "ByteGPT", "Outcome", "Progress", "loss_of", "train"]

_BYTES = 256
Progress = Callable[[int, float, float], None]
"""Called with (step, loss, validation loss) at every validation."""
_VALIDATION_SEED = 10**9


class ByteGPT(nn.Module):
    """Predicts the next byte: int64 [batch, length] to logits [batch, length, 256] in the weights' dtype."""

    symbols = _BYTES
    causal = True

    def __init__(self, *, layers: int = 4, width: int = 128, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.length = length
        self.tokens = nn.Embedding(self.symbols, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, layers, self.causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class ByteBERT(ByteGPT):
    """Guesses the bytes behind `MASK` from both sides; shapes as `ByteGPT`."""

    symbols = _BYTES + 1
    causal = False


class Block(nn.Module):
    """Attention and a perceptron, each after a norm of its own and added to the residual stream."""

    def __init__(self, width: int, heads: int, layers: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Linear(width, 4 * width)
        self.perceptron_out = nn.Linear(4 * width, width)
        for linear in (self.attention, self.perceptron):
            nn.init.normal_(linear.weight, std=0.02)
        for linear in (self.attention_out, self.perceptron_out):
            nn.init.normal_(linear.weight, std=0.02 / (2 * layers) ** 0.5)
        for linear in (self.attention, self.attention_out, self.perceptron, self.perceptron_out):
            nn.init.zeros_(linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention_out(self._attend(self.attention(self.attention_norm(hidden))))
        inner = functional.gelu(self.perceptron(self.perceptron_norm(hidden)))
        added: torch.Tensor = hidden + self.perceptron_out(inner)
        return added

    def _attend(self, projected: torch.Tensor) -> torch.Tensor:
        size, length, triple = projected.shape
        split = projected.view(size, length, 3, self.heads, triple // 3 // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        joined: torch.Tensor = mixed.transpose(1, 2).reshape(size, length, triple // 3)
        return joined


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte with a target, in fp32 from the model's logits. Does not synchronise."""
    logits = model(inputs).float()
    loss: torch.Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
    return loss


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
    project: str = "demo",
    name: str | None = None,
    group: str | None = None,
    server_url: str | None = None,
    folder: Path | None = None,
    transport: Transport | None = None,
) -> Outcome:
    """Train the recipe under `plan` and watch it; reports go to `server_url`, or to `transport`."""
    model = new_model(plan, recipe)
    optimizer = new_optimizer(model, plan, recipe)
    schedule = LambdaLR(optimizer, recipe.rate_factor)
    config = {**asdict(recipe), **asdict(plan)}
    clock = _Clock()
    with collage.init(
        project,
        name or plan.name,
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
                loss = loss_of(model, *_batch(corpus.training, recipe, recipe.seed + step))
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
    kind = ByteBERT if recipe.model == "bert" else ByteGPT
    model = kind(layers=recipe.layers, width=recipe.width, length=recipe.length)
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
