"""Trainings under coupled rounding: the losses of four tasks, and how far ahead of its path a weight stands."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import collage_agent as collage
import msgspec
import torch
from collage_agent.watch_options import WatchArguments
from collage_demo.corpus import DOCUMENTATION, batch, documentation, standard_library
from collage_demo.models import loss_of
from collage_demo.recipe import Plan, Recipe
from collage_demo.training import new_model, new_model_and_optimizer
from collage_optim import CollageAdamW
from collage_optim.blocks import BLOCK_ELEMENTS
from torch import Tensor, nn
from torch.nn.functional import pad

from collage_monitor.seeds import Estimate, SeedValue, difference, mean_over_seeds
from collage_studies.emulated_optimizers import WAYS, EmulatedAdamW, OurAdamW
from collage_studies.held_weights import ReadInBfloat16
from collage_studies.number_words import estimate
from collage_studies.pretrained import build_from_weights, checkpoint
from collage_studies.results import gaps_in_words
from collage_studies.study import MarkdownTable, Plot, PlotCurve, Record, ReportTarget, Trial
from collage_studies.training_trial import SampledRewards, run_training, stored_loss, validation_loss

__all__ = ["evidence_of", "run_trainings", "trainings"]

CLOSED: Final = ("plain", "coupled-8", "coupled-9", "split-master-8bit")
REFERENCE: Final = Plan("fp32 weights and states", "bfloat16")
"""AdamW in fp32; the model reads its weights in bf16, as under the strategies, so that storage alone differs."""
SHAPE: Final = {"steps": 150, "batch_size": 8, "length": 64, "layers": 1, "width": 64, "measure_every": 50}
WATCHED: Final[WatchArguments] = {"oracle": False, "strategy": None}
QUICK: Final = {"steps": 40, "batch_size": 8, "length": 32, "layers": 1, "width": 32, "measure_every": 10}
PRETRAINING: Final[dict[str, Any]] = {"steps": 1500, "batch_size": 16, "learning_rate": 1e-3, "schedule": "cosine"}
RANK, SCALE = 8, 2.0
FP32: Final = "fp32"
AHEAD: Final = (FP32, "coupled-8", "m rounded at random", "coupled-7")
SHARES: Final = (0.0, 0.5, 1.0)
"""Of c m, by which weights are moved on before their loss is taken."""
EARLIER: Final = 50
_WHOLE: Final = 2 * BLOCK_ELEMENTS
"""Elements to which each tensor is filled up: whole blocks in all of WAYS."""


@dataclass(frozen=True)
class Task:
    """A training: its rate, and whether it goes on from a checkpoint, with adapters, or from sampled rewards."""

    title: str
    rate: float
    checkpoint: bool = True
    rank: int = 0
    rewards: bool = False


TASKS: Final = {
    "gpt": Task("GPT from scratch, rate 1e-4", 1e-4, checkpoint=False),
    "tuning": Task("Fine-tuning all weights, rate 1e-5", 1e-5),
    "lora": Task(f"LoRA of rank {RANK}, rate 1e-4", 1e-4, rank=RANK),
    "rewards": Task("Sampled rewards, rate 1e-6", 1e-6, rewards=True),
}


def trainings(seeds: Sequence[int], quick: bool) -> Sequence[Trial]:
    """Tasks × (fp32, strategies), each with all seeds; and one that says how far ahead weights are.

    quick: small ones with one seed, in fp32 and under coupled-8.
    """
    recipe, count = (QUICK, 1) if quick else (SHAPE, len(seeds))
    kept, tasks = (("coupled-8",), ("gpt",)) if quick else (CLOSED, tuple(TASKS))

    def made(rate: float) -> Recipe:
        return Recipe(learning_rate=rate, seed=seeds[0], **recipe)  # type: ignore[arg-type]

    trained = [
        Trial(
            name=f"{strategy}, {name}, seed {seeds[0]}",
            plan=Plan(strategy, "bfloat16"),
            recipe=made(TASKS[name].rate),
            settings={"task": name, "seeds": count},
        )
        for strategy in (REFERENCE.strategy, *kept)
        for name in tasks
    ]
    where = {"ahead": list(AHEAD), "seed": seeds[0], "seeds": count}
    ahead = Trial(name=f"how far ahead, seed {seeds[0]}", recipe=made(TASKS["gpt"].rate), settings=where)
    return [ahead, *trained]


def run_trainings(trial: Trial, reporting: ReportTarget) -> Record:
    """The trainings of a trial, seed by seed."""
    return _train_ahead(trial, reporting) if trial.plan is None else _train(trial, reporting)


def _train(trial: Trial, reporting: ReportTarget) -> Record:
    """The loss of every stored bit of the weights, in fp32."""
    assert trial.recipe is not None
    losses: dict[str, float | None] = {}
    for seed in range(trial.recipe.seed, trial.recipe.seed + trial.settings["seeds"]):
        own = msgspec.structs.replace(trial, recipe=replace(trial.recipe, seed=seed))
        record, losses[f"loss/{seed}"] = _train_once(own, reporting)
    return msgspec.structs.replace(record, trial=trial, values=losses)


def _train_once(trial: Trial, reporting: ReportTarget) -> tuple[Record, float]:
    assert trial.recipe is not None
    task, recipe, corpus, begun = TASKS[trial.settings["task"]], trial.recipe, standard_library(), None
    if task.checkpoint:
        code = standard_library(without=(DOCUMENTATION,))
        weights = checkpoint(replace(recipe, **PRETRAINING), code, reporting.folder / "checkpoints")
        begun, corpus = build_from_weights(weights, rank=task.rank, scale=SCALE), documentation()
    kept: list[tuple[nn.Module, CollageAdamW]] = []

    def build(plan: Plan, recipe: Recipe) -> tuple[nn.Module, Sequence[CollageAdamW]]:
        own = Plan("plain", "float32") if plan == REFERENCE else plan
        model, (optimizer,) = (begun or new_model_and_optimizer)(own, recipe)
        assert isinstance(optimizer, CollageAdamW)
        kept.append((model, optimizer))
        read = ReadInBfloat16(model) if plan == REFERENCE else model
        return SampledRewards(read, recipe.seed) if task.rewards else read, [optimizer]

    record = run_training(trial, reporting, corpus=corpus, build=build, options=WATCHED)
    ((model, optimizer),) = kept
    return record, stored_loss(model, optimizer, recipe, corpus, rewards=task.rewards)


def _train_ahead(trial: Trial, reporting: ReportTarget) -> Record:
    """The same GPT, its numbers kept in several ways: its loss at w − t c m, and how far w is ahead of fp32.

    All weights stand in one vector, so that formats can be trained that our optimizer does not keep.
    """
    assert trial.recipe is not None
    first, values = trial.settings["seed"], dict[str, float | None]()
    with collage.init(
        "studies", trial.name, group=reporting.group, server_url=reporting.server_url, dir=reporting.folder
    ) as reported:
        for seed in range(first, first + trial.settings["seeds"]):
            exact = _train_flat(FP32, replace(trial.recipe, seed=seed))
            for way in trial.settings["ahead"]:
                own = exact if way == FP32 else _train_flat(way, replace(trial.recipe, seed=seed))
                losses = {f"{way}/{share:g}/{seed}": own.loss(share) for share in SHARES}
                values |= {**losses, **{f"{way}/{name}/{seed}": found for name, found in own.beside(exact).items()}}
                collage.log({way: losses[f"{way}/0/{seed}"]}, step=seed)
    return Record(trial=trial, versions={}, cpu_seconds=0.0, run_id=reported.run_id, values=values)


@dataclass(frozen=True)
class _FlatTraining:
    """A model that was trained, and what holds its numbers, one after the other.

    rate: the learning rates at its end; earlier: its first moments EARLIER steps before.
    """

    model: nn.Module
    recipe: Recipe
    contender: EmulatedAdamW | OurAdamW
    rate: Tensor
    earlier: Tensor

    def loss(self, share: float) -> float:
        """Validation loss in fp32 where the weights are w − share · c m."""
        whole = copy.deepcopy(self.model).float()
        _write(whole, self.contender.weight - share * self.contender.ahead(self.rate))
        return validation_loss(whole, self.recipe, standard_library())

    def beside(self, exact: _FlatTraining) -> Mapping[str, float]:
        """How far w is ahead of an exact training, and what m lacks of its m: shares of its c m, by least squares.

        What m lacks is given of the elements whose codes have grown in fp32, beside the largest m of their blocks,
        and of the others, and the share of Σ (c m)² that grows.
        """
        whole, first = exact.contender.ahead(exact.rate), exact.contender.first
        per_moment = torch.where(first == 0, 0.0, whole / first)
        lacking = whole - per_moment * self.contender.first
        grows = _relative(first) > _relative(exact.earlier)

        def share(part: Tensor, among: Tensor) -> float:
            return ((part * whole)[among].sum() / whole[among].square().sum()).item()

        return {
            "ahead": share(exact.contender.weight - self.contender.weight, first != 0),
            "lacks, growing": share(lacking, grows),
            "lacks, others": share(lacking, ~grows),
            "growing": (whole[grows].square().sum() / whole.square().sum()).item(),
        }


def _relative(first: Tensor) -> Tensor:
    """Sizes beside the largest of their block."""
    sizes = first.abs().view(-1, BLOCK_ELEMENTS)
    return (sizes / sizes.amax(1, keepdim=True).clamp_min(1e-30)).view(-1)


def _train_flat(way: str, recipe: Recipe) -> _FlatTraining:
    model, text = new_model(Plan("plain", "bfloat16"), recipe), standard_library().training
    start = _joined(model.parameters())
    made = next(ways[way].made for ways in WAYS.values() if way in ways)
    contender = made(start, recipe.betas[1], torch.full_like(start, recipe.weight_decay), recipe.seed)
    rate, earlier = torch.zeros_like(start, dtype=torch.float32), start
    for step in range(1, recipe.steps + 1):
        rate.fill_(recipe.learning_rate * recipe.rate_factor(step - 1))
        loss = loss_of(model, *batch(text, recipe.batch_size, recipe.length, recipe.seed + step))
        loss.backward()  # type: ignore[no-untyped-call]
        contender.step(_joined(weight.grad for weight in model.parameters()), rate)
        _write(model, contender.weight)
        model.zero_grad()
        if step == recipe.steps - EARLIER:
            earlier = contender.first.clone()
    return _FlatTraining(model, recipe, contender, rate, earlier)


def _joined(tensors: Iterable[Tensor | None]) -> Tensor:
    """All elements in a vector, each tensor filled up with zeros to whole blocks."""
    return torch.cat(
        [pad(own.detach().flatten(), (0, -own.numel() % _WHOLE)) for own in tensors if own is not None]
    )


@torch.no_grad()
def _write(model: nn.Module, joined: Tensor) -> None:
    """Set a model's weights to those that `_joined` would give."""
    begin = 0
    for weight in model.parameters():
        weight.copy_(joined[begin : begin + weight.numel()].view_as(weight))
        begin += weight.numel() + -weight.numel() % _WHOLE


def evidence_of(records: Sequence[Record]) -> tuple[list[str | MarkdownTable | Plot], list[str]]:
    """A table for each task, then how far ahead weights stand; and the gaps in words."""
    evidence, verdicts = list[str | MarkdownTable | Plot](), list[str]()
    for name, task in TASKS.items():
        chosen = [record for record in records if record.trial.settings.get("task") == name]
        of = {record.trial.plan.strategy: record for record in chosen if record.trial.plan}
        if of:
            gaps = _gaps(of)
            evidence += [f"### {task.title}", _table(of, gaps)]
            verdicts.append(f"**{task.title}.** {gaps_in_words(gaps, '+.6f')} {_of_plain(gaps)}".rstrip())
    evidence += [WORSE] if len(verdicts) == len(TASKS) else []
    for record in records:
        if "ahead" in record.trial.settings:
            evidence += [
                "### Why the GPT's loss is lower than fp32's",
                WHY,
                _ahead_table(record),
                _ahead_plot(record),
            ]
    return evidence, verdicts


def _by_seed(record: Record, prefix: str) -> list[SeedValue]:
    """The values whose keys are the prefix and a seed."""
    named = {key.rpartition("/"): value for key, value in record.values.items()}
    return [
        SeedValue(value, None, int(seed))
        for (start, _, seed), value in named.items()
        if start == prefix and value is not None
    ]


def _gaps(of: Mapping[str, Record]) -> Mapping[str, Estimate | None]:
    """Losses less fp32's with the same seed, by strategy."""
    reference = _by_seed(of[REFERENCE.strategy], "loss")
    return {
        name: difference(_by_seed(record, "loss"), reference)
        for name, record in of.items()
        if name != REFERENCE.strategy
    }


def _table(of: Mapping[str, Record], gaps: Mapping[str, Estimate | None]) -> MarkdownTable:
    rows = [
        [
            name,
            estimate(mean_over_seeds([entry.value for entry in _by_seed(record, "loss")])),
            estimate(gaps[name], "+.6f") if name in gaps else "reference",
        ]
        for name, record in of.items()
    ]
    return MarkdownTable(["kept as", "last validation loss", "gap to fp32"], rows)


def _of_plain(gaps: Mapping[str, Estimate | None]) -> str:
    whole, own = gaps.get("plain"), gaps.get("coupled-8")
    if not whole or not own:
        return ""
    return f"The gap of `coupled-8` is {100 * own.value / whole.value:.2g} % of that of `plain`."


def _ahead_table(record: Record) -> MarkdownTable:
    rows = []
    for way in record.trial.settings["ahead"][1:]:
        gaps = [difference(_by_seed(record, f"{way}/{t}"), _by_seed(record, f"{FP32}/{t}")) for t in (0, 1)]
        shares = [_percent(record, f"{way}/{name}") for name in ("ahead", "lacks, growing", "lacks, others")]
        rows.append([way, *(estimate(gap, "+.5f") for gap in gaps), *shares])
    return MarkdownTable(AHEAD_HEAD, rows)


def _percent(record: Record, prefix: str) -> str:
    return estimate(mean_over_seeds([100 * entry.value for entry in _by_seed(record, prefix)]), ".2f")


def _ahead_plot(record: Record) -> Plot:
    curves = {}
    for way in record.trial.settings["ahead"]:
        if way not in (FP32, "coupled-7"):
            gaps = [difference(_by_seed(record, f"{way}/{t:g}"), _by_seed(record, f"{FP32}/{t:g}")) for t in SHARES]
            known = [(share, gap) for share, gap in zip(SHARES, gaps, strict=True) if gap]
            low, high = ([end for _, gap in known if (end := getattr(gap, name)) is not None] for name in ENDS)
            curves[way] = PlotCurve([share for share, _ in known], [gap.value for _, gap in known], low, high)
    return Plot(
        file="coupled-rounding-ahead.png",
        title="Loss at w − t c m, less fp32's at its own w − t c m",
        x="t",
        y="gap to fp32 (nats a byte)",
        curves=curves,
    )


ENDS: Final = ("low", "high")
AHEAD_HEAD: Final = (
    *("kept as", "gap to fp32", "gap at x", "w is ahead by, % of c m"),
    *("m lacks where it grows, %", "m lacks elsewhere, %"),
)
WHY: Final = (
    "Rounding to nearest keeps a code until m has grown by half of its step, and the weight gets what m did not "
    "take. So where m grows it lacks a part, and the weight is ahead, on the way to x = w − c m, where the loss "
    "of this training is lower. The table and the figure show it; the weights stand in one vector here, and all "
    "else is as in *GPT from scratch*. At x nine tenths of `coupled-8`'s gap are gone. No gap is shown if its m "
    "is rounded at random, in the study's own code, though the weight still takes what that leaves. With wider "
    "steps of m the weight is further ahead (`coupled-7`: six bits). *Grows*: in fp32, over the last 50 "
    "updates, beside the largest m of its block of 128; most of Σ (c m)² does. Shares of c m are by least "
    "squares."
)
WORSE: Final = (
    "By the letter `coupled-8` ends worse than fp32 beyond chance in two of the four trainings, fine-tuning and "
    "sampled rewards. Its gaps there are below 1 % of those of `plain`. The rates are 1e-5 and 1e-6; a 24-bit "
    "weight near 1 moves by steps of 3e-5, near 0.05 by 1e-6. `split-master-8bit`, which keeps 32 bits of the "
    "weight and as many of m, but fewer of v, is not shown to be worse there. So what `coupled-8` loses is in "
    "the weight's last 8 bits."
)
