"""The figures of docs/explanation/, drawn with the project's own numerics: `python -m tools.figures`.

Each is drawn from numbers that a function here returns; tests/docs/test_explanation.py holds the page to them.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from collage_optim.numerics import grow, neighbour
from matplotlib import pyplot
from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[1] / "docs" / "explanation" / "images"
UPDATE = 0.001
STEPS = 20
DECAYS = 1000
BETA2 = 0.999
LOST, KEPT, EXACT = "#d1603d", "#2f6f9f", "#777777"


def grid(first: float, last: float) -> list[float]:
    """The bfloat16 numbers from `first` to `last`."""
    numbers = [torch.tensor(first, dtype=torch.bfloat16)]
    up = torch.tensor(float("inf"), dtype=torch.bfloat16)
    while numbers[-1].item() < last:
        numbers.append(neighbour(numbers[-1], up))
    return [number.item() for number in numbers]


def additions() -> dict[str, list[float]]:
    """A weight that begins at 1, after each of STEPS updates: as one bfloat16 number, as a pair, and exactly."""
    plain = torch.tensor(1.0, dtype=torch.bfloat16)
    high, low = plain.clone(), torch.zeros_like(plain)
    update = torch.tensor(UPDATE, dtype=torch.bfloat16)
    found: dict[str, list[float]] = {"plain": [1.0], "visible": [1.0], "pair": [1.0], "exact": [1.0]}
    for step in range(1, STEPS + 1):
        plain = plain + update
        high, low = grow(high, low, update)
        found["plain"].append(plain.item())
        found["visible"].append(high.item())
        found["pair"].append(high.item() + low.item())
        found["exact"].append(1.0 + step * update.item())
    return found


def decays() -> dict[str, list[float]]:
    """A second moment of 1 that nothing is added to, multiplied by BETA2: in bfloat16, and exactly."""
    moment, found = torch.tensor(1.0, dtype=torch.bfloat16), {"bfloat16": [1.0], "exact": [1.0]}
    for step in range(1, DECAYS + 1):
        moment = moment * BETA2
        found["bfloat16"].append(moment.item())
        found["exact"].append(BETA2**step)
    return found


def draw_grid() -> Figure:
    """The numbers around 1, and where 1 + 0.001 falls."""
    numbers = grid(0.984375, 1.0234375)
    figure, axes = pyplot.subplots(figsize=(8, 1.9), layout="constrained")
    axes.vlines(numbers, 0, 1, color=KEPT)
    axes.axvspan(1 - 2**-9, 1 + 2**-8, color=EXACT, alpha=0.2, lw=0)
    axes.annotate("1 + 0.001", (1 + UPDATE, 0.5), (1 + UPDATE, 1.35), arrowprops={"arrowstyle": "->"}, ha="center")
    axes.text(1.0165, 1.1, "blue: numbers that bfloat16 has · grey: all of this becomes 1", ha="center", fontsize=8)
    axes.set(
        yticks=[], ylim=(0, 1.6), xticks=numbers[::2], xticklabels=[f"{number:.4f}" for number in numbers[::2]]
    )
    axes.spines[["top", "left", "right"]].set_visible(False)
    return figure


def draw_additions() -> Figure:
    """One number and a pair under the same twenty updates."""
    found = additions()
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    axes.plot(found["exact"], color=EXACT, lw=4, alpha=0.4, label="exact")
    axes.plot(found["plain"], color=LOST, marker=".", label="one bfloat16 number: every update is lost")
    axes.step(
        range(STEPS + 1), found["visible"], color=KEPT, where="post", ls=":", label="pair: the visible weight"
    )
    axes.plot(found["pair"], color=KEPT, marker=".", label="pair: weight and residual together")
    axes.set(xlabel="updates of 0.001", ylabel="weight", xticks=range(0, STEPS + 1, 5))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_decays() -> Figure:
    """A second moment after the gradients have gone."""
    found = decays()
    figure, axes = pyplot.subplots(figsize=(8, 2.8), layout="constrained")
    axes.plot(found["exact"], color=EXACT, lw=4, alpha=0.4, label="exact: it falls to a third")
    axes.plot(found["bfloat16"], color=LOST, label="bfloat16: it stays where it is")
    axes.set(xlabel="steps without a gradient (β₂ = 0.999)", ylabel="second moment", ylim=(0, 1.1))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


FIGURES = {"grid": draw_grid, "additions": draw_additions, "decays": draw_decays}


def main() -> None:
    """Draw all; the same code draws the same bytes."""
    matplotlib.rcParams.update({"svg.hashsalt": "collage", "font.family": "DejaVu Sans", "svg.fonttype": "path"})
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw()
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


if __name__ == "__main__":
    main()
