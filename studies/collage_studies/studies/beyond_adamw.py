"""SGD with momentum, Lion and Muon, with and without expansions, against fp32 of the same rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from collage_demo.recipe import Plan, Recipe
from collage_demo.training import Build, new_model
from collage_optim import CollageAdamW, CollageLion, CollageSGD
from torch import nn
from torch.optim import Optimizer

from collage_studies.held_weights import ReadInBfloat16, expansion, round_weights_after_steps
from collage_studies.number_words import UNDEFINED, estimate, listed
from collage_studies.results import by_plan, gaps, gaps_in_words, mean, mean_curve, mean_of, recipe_of
from collage_studies.study import MarkdownTable, Page, Plot, Record, ReportTarget, Study, Trial
from collage_studies.training_trial import run_training

__all__ = ["STUDY"]

REFERENCE: Final = Plan("plain", "float32")
_OF_OURS: Final = tuple(Plan(name, "bfloat16") for name in ("plain", "stochastic", "light", "split-master-16bit"))
PARTS: Final = {"one bf16 number, fp32 momentum": 1, "bf16 pair, fp32 momentum": 2, "fp32, computed in bf16": None}
"""How many bfloat16 numbers hold each of Muon's weights; None: not rounded."""


@dataclass(frozen=True)
class StudiedRule:
    """An update rule of the study: its rate and decay, and the ways to keep its weights.

    `rates`: the rate of the tables, then the best rate if it is another one.
    """

    title: str
    rates: tuple[float, ...]
    weight_decay: float
    plans: tuple[Plan, ...]


RULES: Final = {
    "sgd": StudiedRule("SGD, momentum 0.9", (0.1,), 0.0, _OF_OURS),
    "lion": StudiedRule("Lion", (3e-4, 1e-3), 0.1, _OF_OURS),
    "muon": StudiedRule("Muon", (1e-2,), 0.1, (_OF_OURS[0], *(Plan(name, "bfloat16") for name in PARTS))),
}
SEEDS: Final = (1, 2, 3)
SHAPE: Final = {"steps": 250, "batch_size": 8, "length": 64, "layers": 2, "width": 64, "warm_up_steps": 30}
QUICK: Final = {"steps": 40, "batch_size": 8, "length": 32, "layers": 1, "width": 32, "warm_up_steps": 10}


def trials(quick: bool) -> Sequence[Trial]:
    """Rules × rates × (fp32, ways of keeping weights) × seeds; quick: one seed, SGD and Muon, fp32 and the pair."""
    shape = QUICK if quick else SHAPE
    chosen = (
        {"sgd": (REFERENCE, Plan("light", "bfloat16")), "muon": (REFERENCE, RULES["muon"].plans[2])}
        if quick
        else None
    )
    return [
        Trial(
            name=f"{name}, {plan.name}, {f'rate {rate:g}, ' if rate != rule.rates[0] else ''}seed {seed}",
            plan=plan,
            recipe=Recipe(
                learning_rate=rate,
                weight_decay=rule.weight_decay,
                schedule="cosine",
                seed=seed,
                **shape,  # type: ignore[arg-type]
            ),
            settings={"rule": name},
            curves=("edq_ratio",),
        )
        for name, rule in RULES.items()
        if chosen is None or name in chosen
        for rate in rule.rates
        for plan in (chosen[name] if chosen else (REFERENCE, *rule.plans))
        for seed in SEEDS[: 1 if quick else None]
    ]


def run(trial: Trial, reporting: ReportTarget) -> Record:
    """Train with the optimizer of the trial's rule."""
    return run_training(trial, reporting, build=_BUILDS[trial.settings["rule"]])


def _ours(kind: Any, options: Mapping[str, Any], plan: Plan, recipe: Recipe) -> Any:
    model = new_model(plan, recipe)
    given: dict[str, Any] = {
        "lr": recipe.learning_rate,
        "weight_decay": recipe.weight_decay,
        "strategy": plan.strategy,
    }
    return model, [kind(model.parameters(), **given, **options)]


def _muon(plan: Plan, recipe: Recipe) -> tuple[nn.Module, list[Optimizer]]:
    """torch's Muon on the matrices of the blocks, and AdamW on the rest; Muon's rate is scaled to match AdamW's."""
    held = plan.strategy in PARTS
    inner = new_model(REFERENCE if held else plan, recipe)
    matrices = [weight for weight in inner.blocks.parameters() if weight.dim() == 2]
    known = {id(weight) for weight in matrices}
    rest = [weight for weight in inner.parameters() if id(weight) not in known]
    shared: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    muon = torch.optim.Muon(matrices, **shared, adjust_lr_fn="match_rms_adamw")
    if not held:
        return inner, [muon, CollageAdamW(rest, **shared, betas=recipe.betas, strategy="plain")]
    optimizers: list[Optimizer] = [muon, torch.optim.AdamW(rest, **shared, betas=recipe.betas)]
    parts = PARTS[plan.strategy]
    if parts is not None:
        round_weights_after_steps(optimizers, expansion(torch.bfloat16, parts))
    return ReadInBfloat16(inner), optimizers


_BUILDS: Final[Mapping[str, Build]] = {
    "sgd": partial(_ours, CollageSGD, {"momentum": 0.9}),
    "lion": partial(_ours, CollageLion, {"betas": (0.9, 0.99)}),
    "muon": _muon,
}


def page(records: Sequence[Record]) -> Page:
    """A table and a plot of EDQ along the cosine for each rule, and results at its best rate if it is another
    one."""
    evidence: list[str | MarkdownTable | Plot] = []
    verdicts = []
    for name, rule in RULES.items():
        every = [record for record in records if record.trial.settings["rule"] == name]
        best = [record for record in every if recipe_of(record).learning_rate in rule.rates[1:]]
        own = [record for record in every if recipe_of(record).learning_rate not in rule.rates[1:]]
        if not own:
            continue
        evidence += [f"### {rule.title}, learning rate {rule.rates[0]:g}", _table(own), _plot(name, rule, own)]
        evidence += [_at_the_best_rate(best)] if best else []
        found = {plan.strategy: gap for plan, gap in gaps(own, REFERENCE).items()}
        verdicts.append(f"**{rule.title}.** {gaps_in_words(found)}")
        verdicts.append(_kept(own))
    return Page(
        " ".join(verdicts),
        evidence,
        [
            "Each rule has one rate: the best of four (half a decade apart) in fp32 with seed 1. Lion has the "
            "next lower one, because at its best rate the seeds of fp32 alone end too far apart. The model has "
            "some 137,000 parameters and trains for 250 steps of 512 bytes, along a cosine to zero.",
            "With three seeds, an interval that includes 0 does not prove that there is no gap.",
            "Our optimizers have no Muon. torch's Muon updates fp32 weights here, and each step ends by rounding "
            "them to one or two bfloat16 numbers; the forward and backward passes read them in bfloat16. Its "
            "momentum stays fp32. `plain` is torch's Muon on bfloat16 weights, unchanged.",
            "A merged EDQ weighs updates by their size, so large early steps outweigh those at the end of the "
            "cosine. A merged EDQ near 1 does not show that the end of the run kept its updates.",
            "Muon computes its update in bfloat16, whatever the dtype of the weights. The EDQ of fp32 shows what "
            "that costs; it is no loss in storage.",
        ],
    )


def _table(records: Sequence[Record]) -> MarkdownTable:
    found = gaps(records, REFERENCE)
    rows = [
        [
            "fp32" if plan == REFERENCE else plan.strategy,
            estimate(mean_of(own, "validation_loss")),
            "reference" if plan == REFERENCE else estimate(found[plan], "+.4f"),
            mean(own, "edq_ratio", ".3f", merged=True),
            UNDEFINED if (late := _late(own)) is None else f"{late:.2f}",
            mean(own, "lost_update_ratio", ".1%", merged=True),
            mean(own, "update_error_ratio", ".3f", merged=True),
            mean(own, "edq_oracle_ratio", ".3f", merged=True),
        ]
        for plan, own in by_plan(records).items()
    ]
    head = ["kept as", "validation loss", "gap to fp32", "EDQ", "EDQ, last third", "updates lost", "update error"]
    return MarkdownTable([*head, "EDQ of the oracle"], rows)


def _at_the_best_rate(records: Sequence[Record]) -> str:
    """How far apart the seeds of fp32 end at the best rate, which gaps are shown there, and the updates lost."""
    plans = by_plan(records)
    losses = [record.values["validation_loss"] or 0.0 for record in plans[REFERENCE]]
    found = {plan.strategy: gap for plan, gap in gaps(records, REFERENCE).items()}
    lost = [
        f"{mean(own, 'lost_update_ratio', '.1%', merged=True)} (`{plan.strategy}`)"
        for plan, own in plans.items()
        if plan != REFERENCE
    ]
    return (
        f"At {recipe_of(records[0]).learning_rate:g}, the best rate in fp32 with seed 1, the seeds of fp32 alone "
        f"end {max(losses) - min(losses):.2f} nats apart. {gaps_in_words(found)} "
        f"The share of updates lost is {listed(lost)}."
    )


def _kept(records: Sequence[Record]) -> str:
    """EDQ in the last third of each way of keeping weights, the lowest first."""
    found = [
        (late, plan.strategy)
        for plan, own in by_plan(records).items()
        if plan != REFERENCE and (late := _late(own)) is not None
    ]
    said = listed(f"{late:.2f} (`{name}`)" for late, name in sorted(found)) if found else ""
    return f"In the last third of the steps EDQ is {said}." if said else ""


def _late(records: Sequence[Record]) -> float | None:
    """EDQ in the last third of the steps, as a mean over measured steps and seeds."""
    points = mean_curve(records, "edq_ratio")
    late = [value for step, value in zip(points.x, points.y, strict=True) if 3 * step > 2 * points.x[-1]]
    return sum(late) / len(late) if late else None


def _plot(name: str, rule: StudiedRule, records: Sequence[Record]) -> Plot:
    return Plot(
        file=f"beyond-adamw-{name}.png",
        title=f"{rule.title}: EDQ along the cosine, mean over seeds",
        x="step",
        y="EDQ",
        curves={
            "fp32" if plan == REFERENCE else plan.strategy: mean_curve(own, "edq_ratio")
            for plan, own in by_plan(records).items()
        },
    )


STUDY: Final = Study(
    name="beyond-adamw",
    title="Beyond AdamW",
    short="SGD, Lion and Muon lose updates in plain bfloat16, too, and end at a higher loss than fp32. With "
    "weights kept in two parts, no difference from fp32's loss is shown.",
    question="Do SGD with momentum, Lion and Muon lose updates in bfloat16 as AdamW does? Do expansions cure that?",
    method="The small GPT is trained by each rule at a rate that suits it, along a cosine to zero, in fp32 and in "
    "bfloat16 with weights kept in several ways. Three seeds give all of them the same weights and batches. The "
    "gap is the last validation loss less that of fp32 with the same rule and seed, with Student's 95 % "
    "interval. Every other number but the EDQ of the last third is merged over all measured steps.",
    trials=trials,
    run=run,
    page=page,
)
