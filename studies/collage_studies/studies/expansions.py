"""How much of small additions one number, a pair and a triple keep: 200 + 0.1, then other magnitudes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import collage_agent as collage
import torch
from collage_optim.numerics import join, renormalise, round_to, split
from torch import Tensor

from collage_studies.number_words import listed, number, quoted, share
from collage_studies.study import MarkdownTable, Page, Plot, PlotCurve, Record, ReportTarget, Study, Trial

__all__ = ["STUDY"]

WAYS: Final = (
    *(
        (name, components)
        for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
        for components in (1, 2, 3)
    ),
    ("float32", 1),
)
"""Formats and components. One float32 equals a bfloat16 number and the 16 bits below it (`split-master`)."""
START: Final = 200.0
ADDED: Final = 0.1
EXPONENTS: Final = tuple(range(-10, 8))
"""Powers of two by which 0.1 is multiplied before it is added."""
MOST: Final = 1000
ROOM: Final = 50.0
"""The most that is added: the sum stays below 256, so neighbouring numbers keep the distance they have at 200."""
KEPT: Final = 0.99
"""At least this share of what was added counts as kept."""


def trials(quick: bool) -> Sequence[Trial]:
    """Each format as one, two and three components; quick: bfloat16."""
    return [
        Trial(name=_name(dtype, components), settings={"dtype": dtype, "components": components, "most": MOST})
        for dtype, components in (WAYS[:3] if quick else WAYS)
    ]


def _name(dtype: str, components: int) -> str:
    if dtype == "float32":
        return "bfloat16 and 16 bits (fp32)"
    return dtype if components == 1 else f"{dtype}, {'pair' if components == 2 else 'triple'}"


def run(trial: Trial, reporting: ReportTarget) -> Record:
    """Add each rounded number to 200, up to 1,000 times, and send the server the share of 0.1 that arrived.

    The total added, and the start as the expansion holds it, are known exactly in fp64.
    """
    dtype: torch.dtype = getattr(torch, trial.settings["dtype"])
    components, most = trial.settings["components"], trial.settings["most"]
    wanted = torch.tensor([ADDED * 2.0**exponent for exponent in EXPONENTS], dtype=torch.float64)
    step = round_to(wanted, dtype)
    counts = (ROOM / wanted).long().clamp(max=most)
    kept = split(torch.full_like(wanted, START), dtype, components)
    begun, place = join(*kept), EXPONENTS.index(0)
    values: dict[str, float | None] = {"rounded": step[place].double().item()}
    with collage.init(
        "studies",
        trial.name,
        group=reporting.group,
        config=trial.settings,
        server_url=reporting.server_url,
        dir=reporting.folder,
    ) as reported:
        for count in range(1, int(counts.max()) + 1):
            added = torch.where(counts >= count, step.double(), 0.0).to(dtype)
            kept = _sum(kept, added, components)
            arrived = (join(*kept) - begun) / (step.double() * counts.clamp(max=count))
            if count == 1:
                values["once"] = arrived[place].item()
            if count == 1 or count % 25 == 0:
                collage.log({"kept_ratio": arrived[place].item()}, step=count)
    values |= {f"often/{exponent}": _finite(value) for exponent, value in zip(EXPONENTS, arrived, strict=True)}
    return Record(trial=trial, versions={}, cpu_seconds=0.0, run_id=reported.run_id, values=values)


def _sum(kept: tuple[Tensor, ...], added: Tensor, components: int) -> tuple[Tensor, ...]:
    if components == 1:
        return (round_to(kept[0].double() + added.double(), kept[0].dtype),)
    return renormalise(*kept, added, length=components)


def _finite(value: Tensor) -> float | None:
    """None where the format overflowed to infinity or NaN."""
    return value.item() if torch.isfinite(value) else None


def page(records: Sequence[Record]) -> Page:
    """A table of 200 + 0.1, and a plot of the share that arrives of smaller and larger numbers."""
    rows = []
    curves = {}
    for record in records:
        known = [(ADDED * 2.0**e, value) for e in EXPONENTS if (value := record.values[f"often/{e}"]) is not None]
        lost = [added for added, value in known if abs(value - 1) > 1 - KEPT]
        above = [added for added, _ in known if added > max(lost, default=0.0)]
        values = record.values
        bound = f"from {min(above):.2g}" if above else "none"
        rows.append([record.trial.name, share(values["once"]), share(values["often/0"]), bound])
        curves[record.trial.name] = PlotCurve([x for x, _ in known], [y for _, y in known])
    ends = {record.trial.name: record.values["often/0"] for record in records}
    halved = [name for name, end in ends.items() if end is not None and end < 0.5]
    held = [name for name, end in ends.items() if end is not None and abs(end - 1) <= 1 - KEPT]
    over = [f"`{name}` ({share(end)})" for name, end in ends.items() if end is not None and end - 1 > 1 - KEPT]
    count = min(MOST, int(ROOM / ADDED))
    lost_in = f"More than half of it is lost in {quoted(halved)}." if halved else "No format loses more than half."
    parts = [f"0.1 is added to 200, {count:,} times.", lost_in]
    parts += [f"All of it arrives, within {share(1 - KEPT)}, in {quoted(held)}."] if held else []
    parts += [f"Rounding goes up, so more than all of it arrives, in {listed(over)}."] if over else []
    return Page(
        " ".join(parts),
        [
            MarkdownTable(
                ["kept as", "200 + 0.1, once", f"{count:,} times", f"keeps {share(KEPT)} of additions"], rows
            ),
            Plot(
                file="expansions.png",
                title="Share of what is added to 200 that arrives",
                x="added each time, up to 1,000 times",
                y="arrived / added",
                curves=curves,
                x_scale="log",
            ),
        ],
        [
            f"0.1 is first rounded to the format ({number(records[0].values['rounded'], 6)} in bfloat16), so the "
            "study measures how much of that number addition keeps. Where rounding goes up, more than 100 % "
            "arrives.",
            "Formats of 8 bits are emulated: each operation is exact and then rounded once.",
        ],
    )


STUDY: Final = Study(
    name="expansions",
    title="What an expansion keeps",
    short="When 0.1 is added to 200 again and again, a single bfloat16 number loses most of it, and two bfloat16 "
    "numbers together keep all of it. Two 8-bit floats lose most of it.",
    question="How much of 200 + 0.1, and of smaller and larger additions, do one, two and three numbers of "
    "bfloat16, float16 and 8-bit floats keep?",
    method="200 is split into one, two or three components. 0.1 · 2ᵏ, rounded to the format, is added to them up "
    "to 1,000 times, stopping at 250. Two and three components are added by error-free transformations "
    "(`renormalise`), a single one by a rounded addition. The share that arrives is the increase of the sum "
    "divided by the total added, in fp64. One float32 counts as a bfloat16 number and the 16 bits below it.",
    trials=trials,
    run=run,
    page=page,
)
