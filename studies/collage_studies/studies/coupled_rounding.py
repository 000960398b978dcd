"""Coupled rounding: where ten streams of gradients end beside fp64, and whether losses show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import collage_agent as collage
import torch
from torch import Tensor

from collage_studies.coupled_trainings import evidence_of, run_trainings, trainings
from collage_studies.emulated_optimizers import WAYS, EmulatedAdamW
from collage_studies.number_words import UNDEFINED, listed
from collage_studies.study import Curve, MarkdownTable, Page, Plot, PlotCurve, Record, ReportTarget, Study, Trial

__all__ = ["ELEMENTS", "STREAMS", "STUDY", "errors", "gradients", "rates_and_decay"]

ELEMENTS: Final = 256
SEEDS: Final = (1, 2, 3, 4, 5)
BETA2: Final = (0.999, 0.98, 0.95)
OF_PARTS: Final = (0.999, 0.95)
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


def trials(quick: bool) -> Sequence[Trial]:
    """Ways to keep numbers × β₂, all streams and seeds together; then trainings.

    quick: 200 updates at one β₂ of our strategies and the others, and some trainings.
    """
    together = {"seed": SEEDS[0], "seeds": len(SEEDS), "updates": 200 if quick else UPDATES}
    groups = {"ours and others": {**WAYS["ours"], **WAYS["packed"], **WAYS["others"]}} if quick else WAYS
    streams = [
        Trial(
            name=f"streams, {group}, β₂ {beta2:g}, seed {SEEDS[0]}",
            settings={"ways": list(ways), "beta2": beta2, **together},
        )
        for beta2 in (BETA2[:1] if quick else BETA2)
        for group, ways in groups.items()
        if group in ("ours", "packed", "others") or (group in ("parts", "dithered") and beta2 in OF_PARTS) or quick
    ]
    return [*streams, *trainings(SEEDS, quick)]


def run(trial: Trial, reporting: ReportTarget) -> Record:
    """Step the ways beside fp64 on all streams; or train."""
    return run_trainings(trial, reporting) if trial.recipe else _run_streams(trial, reporting)


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


Errors = Mapping[tuple[str, str, float], Sequence[float]]
"""Errors by way, stream and β₂: one a seed."""
GOALS: Final[Sequence[tuple[str, float, float, int]]] = (
    ("coupled-9", 0.999, 1e-3, 8),
    ("coupled-8", 0.999, 5e-3, 9),
    ("coupled-8", 0.999, 2e-2, 10),
    ("coupled-7", 0.999, 1e-2, 7),
    ("coupled-7", 0.98, 1e-2, 7),
    ("coupled-7", 0.95, 1e-2, 7),
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
        for key, value in record.values.items() if "beta2" in record.trial.settings else ():
            way, _, rest = key.partition("/")
            if rest:
                where = way, rest.partition("/")[0], record.trial.settings["beta2"]
                found.setdefault(where, []).append(value or 0.0)
    betas = sorted({beta2 for *_, beta2 in found}, reverse=True)
    evidence: list[str | MarkdownTable | Plot] = ["### The idea", IDEA]
    judged = {beta2: [(stream, beta2) for stream in JUDGED] for beta2 in betas}
    for beta2, cases in judged.items():
        evidence += [
            f"### Ten streams, β₂ = {beta2:g}",
            _table(found, [*WAYS["ours"], *WAYS["packed"], *WAYS["others"]], cases),
        ]
        evidence += [_growth(records)] if beta2 == betas[0] else []
    goals = [_goal(found, *goal) for goal in GOALS if goal[1] in betas]
    evidence += ["### What was to be reached", MarkdownTable(GOAL_HEAD, goals), _sevens(found, betas[0])]
    evidence += ["### Which part does what", PARTS]
    for beta2 in OF_PARTS[: len(betas)]:
        evidence += [
            f"β₂ = {beta2:g}:",
            _table(found, [*WAYS["parts"], *WAYS["dithered"]], judged[beta2]),
        ]
    evidence += ["### Where it fails", FAILING, _table(found, IN_HARD, HARD)]
    verdicts = [
        f"At β₂ = {beta2} `{way}` ends within {bound} of fp64's path on {within} of {len(JUDGED)} streams."
        for way, beta2, bound, _, within, *_ in goals
    ]
    before = [fmean(found[UNCOUPLED, *case]) for case in judged[betas[0]]]
    low, high = 100 * min(before), 100 * max(before)
    verdicts.append(f"At β₂ = {betas[0]:g} `{UNCOUPLED}` ends {low:.2g} to {high:.2g} % off.")
    verdicts += [_better(found, "coupled-8", "split-master-8bit", beta2) for beta2 in betas]
    trained, said = evidence_of(records)
    return Page(" ".join([*verdicts, *said]), [*evidence, *trained], LIMITS)


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


def _sevens(errors: Errors, beta2: float) -> str:
    """What the two divisions of sixteen bits reach, and why one of them is the strategy."""
    means = [{stream: fmean(errors[way, stream, beta2]) for stream in JUDGED} for way in ("coupled-7", FOUR_BITS)]
    (own, worst), (other, others_worst) = (
        (max(found.values()), max(found, key=lambda s: found[s])) for found in means
    )
    nearer = [f"*{stream}*" for stream in JUDGED if means[1][stream] < means[0][stream]]
    why = f", because its v has steps a quarter as wide: {listed(nearer)}" if nearer else ""
    ((_, _, bound, wanted), *_) = (goal for goal in GOALS if goal[0] == "coupled-7")
    within = sum(error <= bound for error in means[0].values())
    return (
        f"**7 bytes.** `coupled-7` is within {100 * bound:g} % on {within} of {len(JUDGED)} streams; {wanted} were "
        f"wanted. `{FOUR_BITS}` ends nearer to fp64 on {len(nearer)} of them{why}. But it ends "
        f"{100 * other:.2g} % off in *{others_worst}*, and `coupled-7` at most {100 * own:.2g} % (*{worst}*). "
        "The strategy is the one with the smaller largest error."
    )


def _better(errors: Errors, one: str, other: str, beta2: float) -> str:
    """On how many streams one ends nearer to fp64 than the other, and on which it does not."""
    means = {stream: [fmean(errors[way, stream, beta2]) for way in (one, other)] for stream in JUDGED}
    worse = [stream for stream, (own, others) in means.items() if own >= others]
    but = f", not on {listed(f'*{stream}*' for stream in worse)}" if worse else ""
    return f"At β₂ = {beta2:g} `{one}` ends nearer than `{other}` on {len(JUDGED) - len(worse)} of them{but}."


FOUR_BITS: Final = "m in 4 bits, v in 12"
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
    "`coupled-7` keeps w in 24 bits, and m and √v in the 6 and 10 bits of one integer. `m in 4 bits, v in 12` "
    "is no strategy: it is emulated, to see what the other division of 16 bits would reach."
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
    "training would notice are beyond chance. They are kept with six digits, so a mean over five seeds may be "
    "off by some millionths.",
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
