"""How the error of a strategy grows over 100, 1,000 and 10,000 updates, and where the strategy breaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import collage_agent as collage
import torch
from collage_optim import CollageAdamW
from torch import Tensor, nn

from collage_monitor.seeds import Estimate, mean_over_seeds
from collage_studies.number_words import listed, share
from collage_studies.study import Curve, MarkdownTable, Page, Plot, PlotCurve, Record, ReportTarget, Study, Trial

__all__ = ["STUDY"]

STRATEGIES: Final = (
    "plain",
    "stochastic",
    "kahan",
    "light",
    "light-stochastic",
    "plus",
    "full",
    "split-master",
    "split-master-16bit",
    "split-master-8bit",
    "master-weights",
)
RATES: Final = (3e-4, 1e-5)
SEEDS: Final = (1, 2, 3)
ELEMENTS: Final = 256
COUNTS: Final = (100, 1_000, 10_000)
LOOKS: Final = tuple(sorted({round(10 ** (1 + quarter / 6)) for quarter in range(19)}))
"""Steps at which the error is taken: from 10 to 10,000, six per decade."""
BETAS: Final = (0.9, 0.999)
BROKEN: Final = 0.1
"""From this relative error of the displacement on, a strategy counts as broken."""
CURVE: Final = "displacement_error"


class Weights(nn.Module):
    """Weights near 1 (LayerNorm) and around 0.02 (a linear layer), [ELEMENTS] each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(2, ELEMENTS, generator=generator)
        self.near_one = nn.Parameter((1 + 0.1 * noise[0]).to(torch.bfloat16))
        self.around_zero = nn.Parameter((0.02 * noise[1]).to(torch.bfloat16))


def trials(quick: bool) -> Sequence[Trial]:
    """Rates × seeds × strategies; quick: one rate and seed, three strategies, 1,000 updates."""
    chosen = ("plain", "light", "plus") if quick else STRATEGIES
    return [
        Trial(
            name=f"{strategy}, rate {rate:g}, seed {seed}",
            settings={
                "strategy": strategy,
                "rate": rate,
                "seed": seed,
                "updates": COUNTS[1] if quick else COUNTS[2],
            },
        )
        for rate in RATES[: 1 if quick else None]
        for seed in SEEDS[: 1 if quick else None]
        for strategy in chosen
    ]


def run(trial: Trial, reporting: ReportTarget) -> Record:
    """AdamW under the strategy beside torch's AdamW in fp64, on the same noisy gradients with a drift.

    The error is ‖moved − moved in fp64‖ / ‖moved in fp64‖, of the stored weight (all its components).
    """
    settings = trial.settings
    model, exact = Weights(settings["seed"]), Weights(settings["seed"]).double()
    options = {"lr": settings["rate"], "betas": BETAS, "weight_decay": 0.01}
    optimizer = CollageAdamW(model.parameters(), strategy=settings["strategy"], seed=settings["seed"], **options)
    reference = torch.optim.AdamW(exact.parameters(), **options)
    starts = [parameter.detach().clone().double() for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(1000 + settings["seed"])
    means = [torch.randn(ELEMENTS, generator=generator) * 3e-4 for _ in starts]
    steps: list[int] = []
    errors: list[float | None] = []
    values: dict[str, float | None] = {}
    with collage.init(
        "studies",
        trial.name,
        group=reporting.group,
        seed=settings["seed"],
        config=settings,
        server_url=reporting.server_url,
        dir=reporting.folder,
    ) as reported:
        collage.watch(model, optimizer, strategy=settings["strategy"], every=100, budget=None)
        for step in range(1, settings["updates"] + 1):
            pairs = zip(model.parameters(), exact.parameters(), means, strict=True)
            for parameter, precise, mean in pairs:
                drawn = (mean + torch.randn(ELEMENTS, generator=generator) * 1e-3).to(torch.bfloat16)
                parameter.grad, precise.grad = drawn, drawn.double()
            optimizer.step()
            reference.step()
            if step in LOOKS:
                found = _errors(optimizer, model, exact, starts)
                collage.log({CURVE: found["all"]}, step=step)
                steps.append(step)
                errors.append(found["all"])
                if step in COUNTS:
                    values |= {f"{name}/{step}": error for name, error in found.items()}
    curves = {CURVE: Curve(steps, errors)}
    return Record(trial=trial, versions={}, cpu_seconds=0.0, run_id=reported.run_id, values=values, curves=curves)


def _errors(
    optimizer: CollageAdamW, model: nn.Module, exact: nn.Module, starts: Sequence[Tensor]
) -> dict[str, float]:
    """The error of each parameter by its name, and of all together."""
    found = {}
    off, moved = 0.0, 0.0
    for (name, parameter), precise, start in zip(model.named_parameters(), exact.parameters(), starts, strict=True):
        wanted = precise.detach() - start
        error = optimizer.stored_parameter(parameter).double() - start - wanted
        found[name] = (error.norm() / wanted.norm()).item()
        off += error.square().sum().item()
        moved += wanted.square().sum().item()
    return {**found, "all": (off / moved) ** 0.5}


def page(records: Sequence[Record]) -> Page:
    """Errors after 100, 1,000 and 10,000 updates, their growth, and the update at which each strategy breaks."""
    evidence: list[str | MarkdownTable | Plot] = []
    verdicts = []
    for rate in dict.fromkeys(record.trial.settings["rate"] for record in records):
        own = [record for record in records if record.trial.settings["rate"] == rate]
        evidence += [f"### Learning rate {rate:g}", _table(own), _plot(own, rate)]
        verdicts.append(_verdict(own, rate))
    return Page(
        " ".join(verdicts),
        evidence,
        [
            f"Each trial has {2 * ELEMENTS} weights, β₂ = {BETAS[1]} and gradients of one distribution (mean "
            "3·10⁻⁴, noise 10⁻³). [What accumulates](../numerics.md#what-accumulates-over-10000-steps) covers 37 "
            "distributions.",
            "An error of the displacement says nothing about the loss. Other studies measure the loss.",
        ],
    )


def _by_strategy(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.trial.settings["strategy"], []).append(record)
    return found


def _mean(records: Sequence[Record], name: str) -> Estimate | None:
    return mean_over_seeds([value for record in records if (value := record.values.get(name)) is not None])


def _table(records: Sequence[Record]) -> MarkdownTable:
    rows = []
    for strategy, own in _by_strategy(records).items():
        errors = [_range(_mean(own, f"all/{count}")) for count in COUNTS]
        parts = [_range(_mean(own, f"{name}/{COUNTS[-1]}")) for name in ("near_one", "around_zero")]
        rows.append([strategy, *errors, *parts, _broken_from(own)])
    head = ["strategy", *(f"{count:,} updates" for count in COUNTS)]
    last = f"at {COUNTS[-1]:,}"
    return MarkdownTable(
        [*head, f"near 1, {last}", f"around 0.02, {last}", f"more than {share(BROKEN)} off from"], rows
    )


def _range(found: Estimate | None) -> str:
    if found is None:
        return "–"
    spread = "" if found.spread is None else f" ± {found.spread:.1e}"
    return f"{found.value:.1e}{spread}"


def _broken_from(records: Sequence[Record]) -> str:
    """The first measured update from which the mean error over seeds stays above `BROKEN`."""
    curves = [record.curves[CURVE] for record in records]
    last = None
    for place in reversed(range(len(curves[0].steps))):
        errors = [curve.values[place] for curve in curves]
        if sum(error or 0.0 for error in errors) / len(errors) <= BROKEN:
            break
        last = curves[0].steps[place]
    return "never" if last is None else "the start" if last == LOOKS[0] else f"update {last:,}"


def _plot(records: Sequence[Record], rate: float) -> Plot:
    curves = {}
    for strategy, own in _by_strategy(records).items():
        steps = own[0].curves[CURVE].steps
        found = [
            mean_over_seeds([value for record in own if (value := record.curves[CURVE].values[place]) is not None])
            for place in range(len(steps))
        ]
        # A logarithmic axis needs a positive lower end of the band.
        low = [
            e.value if e is None or e.spread is None else max(e.value - e.spread, e.value / 10) for e in found if e
        ]
        high = [e.value + (e.spread or 0.0) for e in found if e]
        curves[strategy] = PlotCurve(steps, [e.value for e in found if e], low, high)
    return Plot(
        file=f"accumulation-{rate:g}.png",
        title=f"Error of the displacement, learning rate {rate:g} (band: ± one standard deviation)",
        x="updates",
        y="‖moved − fp64‖ / ‖fp64‖",
        curves=curves,
        x_scale="log",
        y_scale="log",
    )


def _verdict(records: Sequence[Record], rate: float) -> str:
    count = records[0].trial.settings["updates"]
    ends = {strategy: _mean(own, f"all/{count}") for strategy, own in _by_strategy(records).items()}
    broken = [f"`{name}` ({share(end.value)})" for name, end in ends.items() if end and end.value > BROKEN]
    held = [f"`{name}`" for name, end in ends.items() if end and end.value <= BROKEN / 10]
    return (
        f"At a rate of {rate:g}, after {count:,} updates, the displacement of the weights is off by more than "
        f"{share(BROKEN)} under {listed(broken or ['no strategy'])}, and by at most {share(BROKEN / 10)} under "
        f"{listed(held or ['no strategy'])}."
    )


STUDY: Final = Study(
    name="accumulation",
    title="How errors accumulate",
    short="After 10,000 updates plain bfloat16 has lost more than 90 % of the distance its weights should have "
    "moved. `split-master` stays within 1 % of it, at a learning rate for pre-training and at one for fine-tuning.",
    question="How does the error of each strategy grow over 100, 1,000 and 10,000 updates? Where does it break?",
    method="AdamW (β₂ = 0.999) updates weights near 1 and around 0.02 with noisy gradients that have a drift. Each "
    "strategy, and torch's own AdamW in fp64, get the same gradients. The error is the distance (2-norm) between "
    "the displacement of the stored weight and that of fp64, relative to the latter. The tables show its mean and "
    "standard deviation over three seeds.",
    trials=trials,
    run=run,
    page=page,
    repeat_metrics=tuple(f"all/{count}" for count in COUNTS),
)
