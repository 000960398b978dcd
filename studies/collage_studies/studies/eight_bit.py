"""Training with weights and states of eight bits, and how much of an fp32 run reaches copies of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from collage_agent.watch_options import WatchArguments
from collage_demo.recipe import Plan, Recipe
from collage_demo.training import new_model, new_model_and_optimizer
from torch import nn
from torch.optim import Optimizer

from collage_studies.held_weights import ReadInBfloat16, expansion, round_weights_after_steps
from collage_studies.number_words import UNDEFINED, estimate, listed, share
from collage_studies.results import by_plan, gaps, gaps_in_words, mean, mean_curve, mean_of, recipe_of
from collage_studies.study import MarkdownTable, Page, Plot, Record, ReportTarget, Study, Trial
from collage_studies.training_trial import run_training

__all__ = ["EMULATED_FORMATS", "STUDY"]

REFERENCE: Final = Plan("plain", "float32")
OURS: Final = tuple(
    Plan(name, "bfloat16") for name in ("plain", "split-master", "split-master-8bit", "split-24bit-8bit")
)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EMULATED_FORMATS: Final[Mapping[str, tuple[torch.dtype, int, bool]]] = {
    "e4m3 pair": (E4M3, 2, False),
    "e4m3 pair, rounded at random": (E4M3, 2, True),
    "e4m3 triple": (E4M3, 3, False),
    "e5m2 triple": (E5M2, 3, False),
}
"""Expansions of 8-bit floats, by format, parts, and whether the last part is rounded at random."""
STATES_AND_GRADIENT_BYTES: Final = 10
"""Bytes per parameter beside such an expansion: two fp32 moments and a bfloat16 gradient."""
RATES: Final = (1e-4, 1e-3)
"""Every storage runs at the first rate, where plain bfloat16 fails; fp32 runs at both, for its copies."""
SEEDS: Final = (1, 2, 3)
CASTS: Final = ("bf16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4")
WINDOWS: Final = (8, 32)
WATCHED: Final[WatchArguments] = {"casts": CASTS, "windows": WINDOWS}
DECREMENT: Final = "state_decrement_ratio/exp_avg_sq"
SHAPE: Final = {"steps": 250, "batch_size": 8, "length": 64, "layers": 2, "width": 64, "warm_up_steps": 30}
QUICK: Final = {"steps": 40, "batch_size": 8, "length": 32, "layers": 1, "width": 32, "warm_up_steps": 10}


def trials(quick: bool) -> Sequence[Trial]:
    """(fp32, ours, expansions of 8-bit floats) × seeds, and fp32 at a larger rate; quick: one seed, four ways."""
    held = [Plan(name, "bfloat16") for name in EMULATED_FORMATS]
    plans = [REFERENCE, OURS[0], OURS[3], held[0]] if quick else [REFERENCE, *OURS, *held]
    shape = QUICK if quick else SHAPE
    return [
        Trial(
            name=f"{plan.name}, rate {rate:g}, seed {seed}",
            plan=plan,
            recipe=Recipe(learning_rate=rate, seed=seed, **shape),  # type: ignore[arg-type]
            curves=tuple(f"cast_changed_ratio/{cast}" for cast in CASTS) if plan == REFERENCE else ("edq_ratio",),
        )
        for rate in RATES[: 1 if quick else None]
        for plan in (plans if rate == RATES[0] else plans[:1])
        for seed in SEEDS[: 1 if quick else None]
    ]


def run(trial: Trial, reporting: ReportTarget) -> Record:
    """Train with the weights stored as the plan says; of the fp32 run, the copies are watched, too."""
    return run_training(
        trial, reporting, build=_build, options=WATCHED if trial.plan == REFERENCE else {"windows": WINDOWS}
    )


def _build(plan: Plan, recipe: Recipe) -> tuple[nn.Module, Sequence[Optimizer]]:
    """The strategy's own optimizer, or torch's AdamW on fp32 weights that are rounded to an expansion."""
    if plan.strategy not in EMULATED_FORMATS:
        return new_model_and_optimizer(plan, recipe)
    dtype, parts, at_random = EMULATED_FORMATS[plan.strategy]
    model = ReadInBfloat16(new_model(REFERENCE, recipe))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    generator = torch.Generator().manual_seed(recipe.seed) if at_random else None
    round_weights_after_steps([optimizer], expansion(dtype, parts, generator))
    return model, [optimizer]


def page(records: Sequence[Record]) -> Page:
    """A table of the storages; then the copies of the fp32 runs at both rates."""
    by_rate = {
        rate: [record for record in records if recipe_of(record).learning_rate == rate]
        for rate in dict.fromkeys(recipe_of(record).learning_rate for record in records)
    }
    rate, own = next(iter(by_rate.items()))
    copies = [(found, by_plan(runs)[REFERENCE]) for found, runs in by_rate.items()]
    gap = {plan.strategy: gap for plan, gap in gaps(own, REFERENCE).items()}
    verdicts = [f"These results are for a learning rate of {rate:g}. {gaps_in_words(gap)}", _kept(own)]
    verdicts += [_mxfp8(found, runs) for found, runs in copies]
    evidence: list[str | MarkdownTable | Plot] = [f"### Weights and states, learning rate {rate:g}", _table(own)]
    evidence += ["### Copies of the fp32 runs", _copies(copies), *(_plot(found, runs) for found, runs in copies)]
    return Page(
        " ".join(verdicts),
        evidence,
        [
            "Our optimizers store no 8-bit floats, so the study emulates them. torch's AdamW updates fp32 "
            "weights, and each step ends by rounding them to the numbers that the expansion can hold, with one "
            "scale (a power of two) per tensor. Both moments stay fp32, and the forward and backward passes read "
            "the sum in bfloat16. The emulation saves no time.",
            "The bytes of the emulated rows are those that such a storage would take, with fp32 moments. All "
            "other bytes are read from the optimizer. Gradients are included.",
            "Every run but fp32 computes in bfloat16, which alone can cause a gap as small as that of "
            "`split-master`. `plain` also keeps its moments in bfloat16, where the second moment cannot decay at "
            "β₂ = 0.999. So its gap need not come from the weights alone.",
            "The copies did not affect the fp32 runs, because nothing was computed with them.",
            "NVFP4 has a scale per tensor beside those of its blocks. That scale follows the tensor's largest "
            "weight, so most steps change nearly all numbers of such a copy. How many of its codes change was "
            "not measured.",
            "The model has some 137,000 parameters and trains for 250 steps of 512 bytes. With three seeds, an "
            "interval that includes 0 does not prove that there is no gap.",
        ],
    )


def _table(records: Sequence[Record]) -> MarkdownTable:
    found = gaps(records, REFERENCE)
    rows = [
        [
            "fp32" if plan == REFERENCE else plan.strategy,
            _bytes(plan, own),
            estimate(mean_of(own, "validation_loss")),
            "reference" if plan == REFERENCE else estimate(found[plan], "+.4f"),
            mean(own, "edq_ratio", ".3f", merged=True),
            mean(own, f"lost_window_ratio/{WINDOWS[-1]}", ".1%", merged=True),
            mean(own, "update_error_ratio", ".3f", merged=True),
            mean(own, DECREMENT, ".3f", merged=True),
        ]
        for plan, own in by_plan(records).items()
    ]
    lost = f"lost over {WINDOWS[-1]} steps"
    head = [
        "kept as",
        "bytes",
        "validation loss",
        "gap to fp32",
        "EDQ",
        lost,
        "update error",
        "decay of exp_avg_sq",
    ]
    return MarkdownTable(head, rows)


def _bytes(plan: Plan, records: Sequence[Record]) -> str:
    if plan.strategy in EMULATED_FORMATS:
        return f"{EMULATED_FORMATS[plan.strategy][1] + STATES_AND_GRADIENT_BYTES}, emulated"
    return mean(records, "bytes_per_parameter")


def _kept(records: Sequence[Record]) -> str:
    found = [
        (arrived.value, plan.strategy)
        for plan, own in by_plan(records).items()
        if plan != REFERENCE and (arrived := mean_of(own, "edq_ratio", merged=True))
    ]
    return f"EDQ is {listed(f'{value:.3f} (`{name}`)' for value, name in sorted(found))}." if found else ""


def _copies(runs: Sequence[tuple[float, Sequence[Record]]]) -> MarkdownTable:
    last = WINDOWS[-1]
    rows = [
        [
            f"{rate:g}",
            cast,
            _share(own, f"cast_changed_ratio/{cast}"),
            *(_share(own, f"cast_changed_window_ratio/{cast}/{steps}") for steps in WINDOWS),
            mean(own, f"cast_edq_ratio/{cast}", ".2f", merged=True),
            mean(own, f"cast_edq_window_ratio/{cast}/{last}", ".2f", merged=True),
        ]
        for rate, own in runs
        for cast in CASTS
    ]
    head = ["learning rate", "copy", "changed by a step", *(f"by {steps} steps" for steps in WINDOWS)]
    head += ["EDQ of the copy, one step", f"{last} steps"]
    return MarkdownTable(
        head,
        rows,
        "The table shows how many elements of a low-precision copy of the fp32 weights change, and how much of the "
        "update reaches the copy.",
    )


def _share(records: Sequence[Record], name: str) -> str:
    found = mean_of(records, name, merged=True)
    return UNDEFINED if found is None else share(found.value)


def _mxfp8(rate: float, records: Sequence[Record]) -> str:
    once = mean_of(records, "cast_changed_ratio/mxfp8", merged=True)
    often = mean_of(records, f"cast_changed_window_ratio/mxfp8/{WINDOWS[-1]}", merged=True)
    over = f", and {WINDOWS[-1]} steps change {share(often.value)} of it" if often else ""
    return (
        f"At a rate of {rate:g}, a step changes {share(once.value) if once else UNDEFINED} of an MXFP8 copy{over}."
    )


def _plot(rate: float, records: Sequence[Record]) -> Plot:
    return Plot(
        file=f"eight-bit-copies-{rate:g}.png",
        title=f"Elements of a copy that a step changes, fp32 run at {rate:g}, mean over seeds",
        x="step",
        y="share of the elements",
        curves={cast: mean_curve(records, f"cast_changed_ratio/{cast}") for cast in CASTS},
    )


STUDY: Final = Study(
    name="eight-bit",
    title="Eight bits",
    short="With 8-bit states no difference from fp32 is shown, if the weight keeps its lost bits "
    "(`split-master-8bit`). Weights stored as a pair of 8-bit floats end worse, unless they are rounded at random.",
    question="Do expansions of two and three 8-bit floats, bfloat16 with eight more bits, and 8-bit states train "
    "as fp32 does? How much of an fp32 run reaches a copy of its weights in MXFP8?",
    method="The small GPT is trained with three seeds, each of which gives every strategy the same weights and "
    "batches. The gap is the last validation loss less that of fp32 with the same seed, with Student's 95 % "
    "interval. Every other number is merged over all measured steps. `split-master` and `split-master-8bit` "
    "differ only in their states, `split-master-8bit` and `split-24bit-8bit` only in the weight.",
    trials=trials,
    run=run,
    page=page,
)
