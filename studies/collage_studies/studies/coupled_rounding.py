"""Coupled rounding: where ten streams of gradients end beside fp64, and whether losses show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

import collage_agent as collage
import msgspec
import torch
from collage_agent.watch_options import WatchArguments
from collage_demo.corpus import DOCUMENTATION, documentation, standard_library
from collage_demo.recipe import Plan, Recipe
from collage_demo.training import new_model_and_optimizer
from collage_optim import CollageAdamW
from torch import Tensor, nn

from collage_monitor.seeds import Estimate, SeedValue, difference, mean_over_seeds
from collage_studies.emulated_optimizers import WAYS, EmulatedAdamW
from collage_studies.held_weights import ReadInBfloat16
from collage_studies.number_words import UNDEFINED, estimate, listed
from collage_studies.pretrained import build_from_weights, checkpoint
from collage_studies.results import gaps_in_words
from collage_studies.study import Curve, MarkdownTable, Page, Plot, PlotCurve, Record, ReportTarget, Study, Trial
from collage_studies.training_trial import SampledRewards, run_training, stored_loss

__all__ = ["ELEMENTS", "STREAMS", "STUDY", "errors", "gradients", "rates_and_decay"]

ELEMENTS: Final = 256
SEEDS: Final = (1, 2, 3, 4, 5)
BETA2: Final = (0.999, 0.98, 0.95)
OF_PARTS: Final = (0.999,)
UPDATES: Final = 10_000


@dataclass(frozen=True)
class Stream:
    """Gradients [updates, ELEMENTS] made of normal noise z, the step's number t [updates, 1] and a generator.

    start: weights made of normal noise; rate(t, updates); decay: λ.
    """

    title: str
    start: Callable[[Tensor, torch.Generator], Tensor]
    rate: Callable[[int, int], float]
    drawn: Callable[[Tensor, Tensor, torch.Generator], Tensor]
    decay: float = 0.0


def _three_decades(noise: Tensor, _: Tensor, generator: torch.Generator) -> Tensor:
    return 10 ** (3 * torch.rand(ELEMENTS, generator=generator) - 4) * (0.2 + noise)


def _heavy_tailed(noise: Tensor, _: Tensor, generator: torch.Generator) -> Tensor:
    return 1e-3 * (
        0.15 + noise / (-(1 - torch.rand(noise.shape, generator=generator)).log()).clamp_min(1e-12).sqrt()
    )


def _sparse(noise: Tensor, _: Tensor, generator: torch.Generator) -> Tensor:
    return torch.where(torch.rand(noise.shape, generator=generator) < 0.02, 0.5 + noise, 0.0)


def _sign_flip(noise: Tensor, times: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.where(torch.rand(noise.shape, generator=generator) < 0.3, -1.0, 1.0).cumprod(0)
    return 1e-3 * signs * noise.abs() * (1 + 0.5 * (times / 500).sin())


def _near_one(noise: Tensor, _: torch.Generator) -> Tensor:
    return 1 + 0.02 * noise


def _falling_rate(step: int, updates: int) -> float:
    return 3e-4 * min(1, step / 200) * 0.5 * (1 + math.cos(math.pi * step / (updates + 1)))


STREAMS: Final = (
    Stream("three decades", lambda z, _: 0.02 * z, lambda *_: 3e-4, _three_decades, 0.01),
    Stream("heavy tails", lambda z, _: 0.5 * z, lambda *_: 3e-4, _heavy_tailed, 0.01),
    Stream(
        "drifting", _near_one, lambda *_: 3e-4, lambda z, t, _: 1e-2 * ((math.tau * t / 4000).sin() + z / 2), 0.01
    ),
    Stream("sparse", lambda z, _: 0.02 * z, lambda *_: 3e-4, _sparse, 0.01),
    Stream("sign flips", lambda z, _: 0.02 * z, lambda *_: 3e-4, _sign_flip, 0.01),
    Stream("tuning", _near_one, lambda *_: 1e-5, lambda z, *_: 0.25 + z),
    Stream("tuning, mean 0", _near_one, lambda *_: 1e-5, lambda z, *_: z),
    Stream("tiny rate", _near_one, lambda *_: 1e-6, lambda z, *_: 0.25 + z),
    Stream(
        "falling",
        lambda z, generator: z * 10 ** (4 * torch.rand(z.shape, generator=generator) - 4),
        _falling_rate,
        lambda z, t, _: (0.3 + z) * (-t / 2500).exp(),
        0.1,
    ),
    Stream("mean 0", lambda z, _: 0.02 * z, lambda *_: 3e-4, lambda z, *_: z),
    Stream("rate falls", _near_one, lambda t, last: 10 ** (-3 - 5 * t / last), lambda z, *_: 0.25 + z),
    Stream("rate rises", _near_one, lambda t, last: 10 ** (-8 + 5 * t / last), lambda z, *_: 0.25 + z),
)
"""Ten to be judged by, and two whose rate moves by five decades."""
JUDGED: Final = tuple(stream.title for stream in STREAMS[:10])


def gradients(seeds: Sequence[int], updates: int) -> tuple[Tensor, Tensor]:
    """bf16 gradients [updates, n] and starts [n], n = streams × seeds × ELEMENTS, in this order."""
    times = torch.arange(1, updates + 1.0).unsqueeze(1)
    drawn, starts = [], []
    for number, stream in enumerate(STREAMS):
        for seed in seeds:
            generator = torch.Generator().manual_seed(1009 * seed + number)
            starts.append(stream.start(torch.randn(ELEMENTS, generator=generator), generator).bfloat16())
            noise = torch.randn(updates, ELEMENTS, generator=generator)
            drawn.append(stream.drawn(noise, times, generator).bfloat16())
    return torch.cat(drawn, 1), torch.cat(starts)


def rates_and_decay(updates: int, seeds: int) -> tuple[Tensor, Tensor]:
    """Learning rates [updates, streams] and the decay of each element [n], in fp64."""
    rates = [[stream.rate(step, updates) for stream in STREAMS] for step in range(1, updates + 1)]
    decay = torch.tensor([stream.decay for stream in STREAMS], dtype=torch.float64)
    return torch.tensor(rates, dtype=torch.float64), decay.repeat_interleave(seeds * ELEMENTS)


CLOSED: Final = ("plain", "coupled-8", "split-master-8bit")
REFERENCE: Final = Plan("fp32 weights and states", "bfloat16")
"""AdamW in fp32; the model reads its weights in bf16, as under the strategies, so that storage alone differs."""
SHAPE: Final = {"steps": 150, "batch_size": 8, "length": 64, "layers": 1, "width": 64, "measure_every": 50}
WATCHED: Final[WatchArguments] = {"oracle": False, "strategy": None}
QUICK: Final = {"steps": 40, "batch_size": 8, "length": 32, "layers": 1, "width": 32, "measure_every": 10}
PRETRAINING: Final[dict[str, Any]] = {"steps": 1500, "batch_size": 16, "learning_rate": 1e-3, "schedule": "cosine"}
RANK, SCALE = 8, 2.0


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


def trials(quick: bool) -> Sequence[Trial]:
    """Ways to keep numbers × β₂, all streams and seeds together; then tasks × (fp32, strategies) × seeds.

    quick: 200 updates at one β₂ of our strategies and the others, and one training in fp32 and under coupled-8.
    """
    together = {"seed": SEEDS[0], "seeds": len(SEEDS), "updates": 200 if quick else UPDATES}
    streams = [
        Trial(
            name=f"streams, {group}, β₂ {beta2:g}, seed {SEEDS[0]}",
            settings={"ways": list(ways), "beta2": beta2, **together},
        )
        for beta2 in BETA2
        for group, ways in WAYS.items()
        if group in ("ours", "others") or beta2 in OF_PARTS
    ]
    recipe, seeds = (QUICK, 1) if quick else (SHAPE, len(SEEDS))
    trainings = [
        Trial(
            name=f"{strategy}, {name}, seed {SEEDS[0]}",
            plan=Plan(strategy, "bfloat16"),
            recipe=Recipe(learning_rate=task.rate, seed=SEEDS[0], **recipe),  # type: ignore[arg-type]
            settings={"task": name, "seeds": seeds},
        )
        for strategy in (REFERENCE.strategy, *CLOSED)
        for name, task in TASKS.items()
    ]
    return [*streams[:2], *trainings[: 2 * len(TASKS) + 1 : 2 * len(TASKS)]] if quick else [*streams, *trainings]


def run(trial: Trial, reporting: ReportTarget) -> Record:
    """Step the ways beside fp64 on all streams; or train."""
    return _run_streams(trial, reporting) if trial.plan is None else _train(trial, reporting)


def _run_streams(trial: Trial, reporting: ReportTarget) -> Record:
    settings = trial.settings
    seeds, updates = range(settings["seed"], settings["seed"] + settings["seeds"]), settings["updates"]
    drawn, start = gradients(seeds, updates)
    alike = len(seeds) * ELEMENTS
    rates, decay = rates_and_decay(updates, len(seeds))
    made = {name: way.made for ways in WAYS.values() for name, way in ways.items()}
    contenders = {name: made[name](start, settings["beta2"], decay, settings["seed"]) for name in settings["ways"]}
    exact = EmulatedAdamW(start, settings["beta2"], decay, 0, torch.float64)
    looks = sorted({round(updates ** (power / 8)) for power in range(4, 9)})
    curves: dict[str, list[float | None]] = {name: [] for name in contenders}
    values: dict[str, float | None] = {}
    with collage.init(
        "studies",
        trial.name,
        group=reporting.group,
        seed=settings["seed"],
        config={"beta2": settings["beta2"], "updates": updates},
        server_url=reporting.server_url,
        dir=reporting.folder,
    ) as reported:
        for step in range(1, updates + 1):
            rate = rates[step - 1].repeat_interleave(alike)
            exact.step(drawn[step - 1], rate)
            for contender in contenders.values():
                contender.step(drawn[step - 1], rate)
            if step in looks:
                for name, contender in contenders.items():
                    found = errors(contender.weight, exact.weight, start, len(seeds))
                    curves[name].append(found[: len(JUDGED)].log().mean().exp().item())
                    values |= {
                        f"{name}/{stream.title}/{seed}": error
                        for stream, own in zip(STREAMS, found.tolist(), strict=True)
                        for seed, error in zip(seeds, own, strict=True)
                    }
                collage.log({name: errors[-1] for name, errors in curves.items()}, step=step)
    kept = {name: Curve(looks, errors) for name, errors in curves.items()}
    return Record(trial=trial, versions={}, cpu_seconds=0.0, run_id=reported.run_id, values=values, curves=kept)


def errors(weight: Tensor, exact: Tensor, start: Tensor, seeds: int) -> Tensor:
    """‖w − w₆₄‖ / ‖w₆₄ − w₀‖, [streams, seeds]."""
    shape = (len(STREAMS), seeds, ELEMENTS)
    off, moved = ((entry.double() - exact).view(shape) for entry in (weight, start))
    found: Tensor = off.norm(dim=-1) / moved.norm(dim=-1)
    return found


def _train(trial: Trial, reporting: ReportTarget) -> Record:
    """The trainings of a plan, seed by seed: the loss of every stored bit of the weights, in fp32."""
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


Errors = Mapping[tuple[str, str, float], Sequence[float]]
"""Errors by way, stream and β₂: one a seed."""
GOALS: Final = (
    ("coupled-9", 0.999, 1e-3, 8),
    ("coupled-8", 0.999, 5e-3, 9),
    ("coupled-8", 0.999, 2e-2, 10),
    ("coupled-7", 0.999, 1e-2, 7),
    ("split-master-8bit", 0.95, 1e-2, 9),
)
"""A way, β₂, an error, and on how many of the ten streams the mean over seeds should be within it."""
UNCOUPLED: Final = "split-master-8bit, not coupled"
HARD: Final = (
    ("sparse", 0.999),
    ("sparse", 0.95),
    ("three decades", 0.95),
    ("rate falls", 0.999),
    ("rate rises", 0.999),
)
IN_HARD: Final = (
    *("fp32", "coupled-9", "coupled-8", "split-master-8bit", UNCOUPLED, "FlashOptim"),
    *("coupled, emulated", "no cut-off", "no bound φ"),
)


def page(records: Sequence[Record]) -> Page:
    """Tables of the streams under each β₂, goals, growth, the parts, hard cases, and trainings."""
    found: dict[tuple[str, str, float], list[float]] = {}
    for record in records:
        for key, value in record.values.items() if record.trial.plan is None else ():
            way, _, rest = key.partition("/")
            if rest:
                where = way, rest.partition("/")[0], record.trial.settings["beta2"]
                found.setdefault(where, []).append(value or 0.0)
    betas = sorted({beta2 for *_, beta2 in found}, reverse=True)
    evidence: list[str | MarkdownTable | Plot] = ["### The idea", IDEA]
    judged = {beta2: [(stream, beta2) for stream in JUDGED] for beta2 in betas}
    for beta2, cases in judged.items():
        evidence += [f"### Ten streams, β₂ = {beta2:g}", _table(found, [*WAYS["ours"], *WAYS["others"]], cases)]
        evidence += [_growth(records)] if beta2 == betas[0] else []
    goals = [_goal(found, *goal) for goal in GOALS if goal[1] in betas]
    evidence += ["### What was to be reached", MarkdownTable(GOAL_HEAD, goals), "### Which part does what", PARTS]
    for beta2 in OF_PARTS[: len(betas)]:
        evidence += [f"β₂ = {beta2:g}:", _table(found, [*WAYS["parts"], *WAYS["dithered"]], judged[beta2])]
    evidence += ["### Where it fails", FAILING, _table(found, IN_HARD, HARD)]
    verdicts = [
        f"At β₂ = {beta2} `{way}` ends within {bound} of fp64's path on {within} of {len(JUDGED)} streams."
        for way, beta2, bound, _, within, *_ in goals
    ]
    before = [fmean(found[UNCOUPLED, *case]) for case in judged[betas[0]]]
    low, high = 100 * min(before), 100 * max(before)
    verdicts.append(f"At β₂ = {betas[0]:g} `{UNCOUPLED}` ends {low:.2g} to {high:.2g} % off.")
    verdicts += [_better(found, "coupled-8", "split-master-8bit", beta2) for beta2 in betas]
    for name, task in TASKS.items():
        chosen = [record for record in records if record.trial.settings.get("task") == name]
        losses = {record.trial.plan: _losses(record) for record in chosen if record.trial.plan}
        if losses:
            own = {plan.strategy: difference(found, losses[REFERENCE]) for plan, found in losses.items()}
            evidence += [f"### {task.title}", _trainings(losses, own)]
            del own[REFERENCE.strategy]
            verdicts.append(f"**{task.title}.** {gaps_in_words(own, '+.5f')} {_of_plain(own)}".rstrip())
    return Page(" ".join(verdicts), evidence, LIMITS)


def _cell(errors: Sequence[float]) -> str:
    """A mean, and the range in units of its power of ten."""
    if not errors:
        return UNDEFINED
    mean, _, power = f"{fmean(errors):.1e}".partition("e")
    low, high = (f"{end / 10.0 ** int(power):.1f}" for end in (min(errors), max(errors)))
    return f"{mean}e{int(power)} ({low}–{high})"


def _table(errors: Errors, names: Sequence[str], cases: Sequence[tuple[str, float]]) -> MarkdownTable:
    """A row for each way that has been stepped, and a column for each stream and β₂."""
    ways = {name: way for group in WAYS.values() for name, way in group.items() if name in names}
    rows = [
        [name, f"{way.bytes:.2f}", *(_cell(errors.get((name, *case), ())) for case in cases)]
        for name, way in sorted(ways.items(), key=lambda entry: -entry[1].bytes)
        if any((name, *case) in errors for case in cases)
    ]
    several = len({beta2 for _, beta2 in cases}) > 1
    head = [f"{stream}, β₂ = {beta2:g}" if several else stream for stream, beta2 in cases]
    caption = (
        "Errors: the mean over five seeds, and in parentheses the range in units of the same power of ten. "
        "Bytes are those of weight, states, scales and a bf16 gradient."
    )
    return MarkdownTable(["kept as", "bytes", *head], rows, caption)


def _growth(records: Sequence[Record]) -> Plot:
    curves = {
        name: PlotCurve(curve.steps, [value or 0.0 for value in curve.values])
        for record in records
        if record.trial.settings.get("beta2") == BETA2[0]
        for name, curve in record.curves.items()
        if name in IN_GROWTH
    }
    return Plot(
        file="coupled-rounding-growth.png",
        title=f"Error (geometric mean over streams and seeds), β₂ = {BETA2[0]:g}",
        x="updates",
        y="‖w − w₆₄‖ / ‖w₆₄ − w₀‖",
        curves=curves,
        x_scale="log",
        y_scale="log",
    )


def _goal(errors: Errors, way: str, beta2: float, bound: float, streams: int) -> list[str]:
    """A row of the table of goals."""
    own = {stream: errors[way, stream, beta2] for stream in JUDGED}
    above = [stream for stream, found in own.items() if fmean(found) > bound]
    always = sum(max(found) <= bound for found in own.values())
    named = ", ".join(f"{stream} {_cell(own[stream])}" for stream in above)
    within = len(own) - len(above)
    return [way, f"{beta2:g}", f"{100 * bound:g} %", str(streams), str(within), str(always), named or "none"]


def _better(errors: Errors, one: str, other: str, beta2: float) -> str:
    """On how many streams one ends nearer to fp64 than the other, and on which it does not."""
    means = {stream: [fmean(errors[way, stream, beta2]) for way in (one, other)] for stream in JUDGED}
    worse = [stream for stream, (own, others) in means.items() if own >= others]
    but = f", not on {listed(f'*{stream}*' for stream in worse)}" if worse else ""
    return f"At β₂ = {beta2:g} `{one}` ends nearer than `{other}` on {len(JUDGED) - len(worse)} of them{but}."


def _of_plain(gap: Mapping[str, Estimate | None]) -> str:
    whole, own = gap.get("plain"), gap.get("coupled-8")
    return (
        f"The gap of `coupled-8` is {100 * own.value / whole.value:.2g} % of that of `plain`."
        if whole and own
        else ""
    )


def _losses(record: Record) -> list[SeedValue]:
    named = {key: value for key, value in record.values.items() if key.startswith("loss/")}
    return [SeedValue(value, None, int(key[5:])) for key, value in named.items() if value is not None]


def _trainings(losses: Mapping[Plan, Sequence[SeedValue]], gap: Mapping[str, Estimate | None]) -> MarkdownTable:
    rows = [
        [
            plan.strategy,
            estimate(mean_over_seeds([entry.value for entry in own])),
            "reference" if plan == REFERENCE else estimate(gap[plan.strategy], "+.5f"),
        ]
        for plan, own in losses.items()
    ]
    return MarkdownTable(["kept as", "last validation loss", "gap to fp32"], rows)


GOAL_HEAD: Final = ("kept as", "β₂", "error", "streams to be within", "by the mean", "by every seed", "above")
IN_GROWTH: Final = ("coupled-9", "coupled-8", "coupled-7", UNCOUPLED, "FlashOptim", "fp32")
IDEA: Final = (
    "If no gradient followed, Adam's first moment m would still move a weight by −c m, with c = lr / (√v̂ + "
    "ε) · Σ β₁ᵏ / (1 − β₁^(t + k)) over k ≥ 1. So x = w − c m is the point where the weight is going. "
    "Rounding changes w by Δw and m by Δm, and x stays where it was if Δw = c Δm. Coupled rounding rounds the "
    "coarser of w and c m to nearest, and gives what that took to the other one. The bits of m then say how "
    "far the weight wobbles around its path, but not where it ends. Half of this is known: ECO gives the "
    "weight's rounding error to the momentum. v needs more bits than m: an 8-bit root has steps of 0.8 % and "
    "more, an update changes it by at most (1 − β₂) / 2 when it falls, and rounding at random lets it wander. "
    "`coupled-8` keeps w in 24 bits, m in 8 and √v in 16; `coupled-9` keeps w in 32. `split-master-8bit` (32, "
    "8, 8) and `split-24bit-8bit` (24, 8, 8) are coupled too, and *not coupled* is what they were before. "
    "`coupled-7` (24, 4, 12) is no strategy: it is emulated to see what 7 bytes can reach."
)
PARTS: Final = (
    "`coupled, emulated` is `coupled-8` rebuilt in the study's own code. Each other row changes one thing in "
    "it. *Dithered*: v is stored as in BReD, with a random offset for each block that is subtracted again at "
    "reading."
)
FAILING: Final = (
    "*Sparse*: v falls between spikes, at β₂ = 0.95 within some tens of updates. So c grows, and with it what "
    "m's rounding error is worth. *Three decades*: gradients of one block differ by up to a factor of 1,000. "
    "*Rate falls* and *rate rises*: the learning rate moves by five decades between 1e-3 and 1e-8. `no bound "
    "φ` and `no cut-off` are emulated `coupled-8` without one of its two bounds. The cut-off makes no "
    "difference here; it is meant for a rate that rises at once, which was not tried."
)
LIMITS: Final = (
    "The gradients of the streams do not depend on the weights. In a training they do, and pull a weight back "
    "to its path, so an error of some per cent need not show in the loss.",
    "FlashOptim, bitsandbytes and ECO are emulated: their published formats, in fp32 arithmetic. Their "
    "software was not run. ECO has bf16 weights here, and FP8 and INT4 in its paper. bitsandbytes keeps "
    "tensors below 4,096 elements in 32 bits by default, and recommends 32 bits for embeddings. A block of "
    "elements with one scale lies in one stream.",
    "FlashOptim and bitsandbytes end far off in *three decades* and *sparse* because their codes round a "
    "small v to 0 while m is not 0. The next update is then m / ε. In a separate run of 300 updates the "
    "largest one was 93,000 learning rates (FlashOptim) and 8,500 (bitsandbytes). FlashOptim rounds its "
    "24-bit weight to nearest, so it stands still where updates are below half of its step (*tuning*, *tiny "
    "rate*).",
    "The trained models have 86,976 parameters and train for 150 steps of 512 bytes. With five seeds, an "
    "interval that includes 0 does not prove that there is no gap.",
    "Losses are paired by seed and by all random numbers, so intervals are narrow, and gaps far below what a "
    "training would notice are beyond chance. They are kept with six digits. Why `coupled-8` and "
    "`split-master-8bit` end lower than fp32 in *GPT from scratch*, with every seed, is not known: "
    "`split-master` and `master-weights` end at fp32's loss there (one seed, to 5 digits).",
    "*Sampled rewards* is REINFORCE on single bytes, with no reference policy and no long answers. Its loss "
    "is the chance that a sampled byte is wrong.",
)

STUDY: Final = Study(
    name="coupled-rounding",
    title="Coupled rounding",
    short="With coupled rounding, AdamW in 8 bytes ends within 0.5 % of fp64's path on nine of ten streams of "
    "gradients; our earlier 8-byte layout ended 0.7 to 5.2 % off. In four trainings the loss of `coupled-8` "
    "differs from fp32's by at most 2.4 % of what plain bfloat16 loses.",
    question="How close to fp64 does AdamW stay in 7, 8 and 9 bytes a parameter if the weight and the first moment "
    "exchange what rounding takes? Which part of the method does what, where does it fail, and does the loss "
    "of trainings show it?",
    method="**Streams.** AdamW (β₁ = 0.9, ε = 1e-8) takes 10,000 updates by bf16 gradients that are drawn, 256 "
    "elements and five seeds a stream. The error is ‖w − w₆₄‖ / ‖w₆₄ − w₀‖ in the 2-norm: w is every stored "
    "bit of the weight, w₆₄ AdamW's in fp64 from the same gradients. With z drawn from the normal law and t "
    "the update, the gradients are: *three decades*, s (0.2 + z), s from 1e-4 to 0.1 by element; *heavy "
    "tails*, 1e-3 (0.15 + Student's law with two degrees of freedom); *drifting*, 0.01 (sin(2πt / 4000) + z / "
    "2). *Sparse* is 0.5 + z in 2 % of the updates, else 0; *sign flips*, 1e-3 |z| (1 + sin(t / 500) / 2), "
    "its sign flipped in 30 % of the updates. *Tuning* and *tiny rate* are 0.25 + z; *tuning, mean 0* and "
    "*mean 0*, z; *falling*, (0.3 + z) e^(−t / 2500). The rate is 3e-4, but 1e-5 for *tuning* and 1e-6 for "
    "*tiny rate*; *falling* has a warm-up and a cosine to 0, decay 0.1 and weights over four decades. The "
    "first five have decay 0.01. Weights are near 1 (*drifting*, *tuning*, *tiny rate*), or around 0 with a "
    "spread of 0.02 (*heavy tails*: 0.5). Our strategies are stepped by `CollageAdamW` itself, everything "
    "else by `collage_studies.emulated_optimizers`. **Trainings.** The small GPT with one layer, five seeds, "
    "β₂ = 0.999. fp32 keeps fp32 weights and states, but its forward and backward passes read the weights in "
    "bf16 as under the strategies. The last loss is that of every stored bit of the weights in fp32, on 64 "
    "batches. A gap is this loss less that of fp32 with the same seed, with Student's 95 % interval. "
    "Fine-tuning, LoRA and rewards go on from a checkpoint, with the data of [fine-tuning](finetuning.md).",
    trials=trials,
    run=run,
    page=page,
    repeat_metrics=(),
)
