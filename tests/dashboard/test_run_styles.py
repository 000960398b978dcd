"""Labels that are unique among the runs shown, colours that stay with the strategy and can be told apart."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from collage_dashboard.figures.style import REFERENCE, STRATEGY_COLOURS, strategy_colour
from collage_dashboard.run_styles import is_stochastic, strategy_title, styles_of

from collage_monitor.strategies import STRATEGIES

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def run(name, strategy="plain", dtype="bfloat16", run_id="01ABCDEF"):
    return SimpleNamespace(run_id=run_id, name=name, strategy=strategy, dtype=dtype)


def lab(colour, matrix):
    """CIE L*a*b* (D65) of '#RRGGBB' as seen through `matrix`."""
    srgb = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(matrix @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratios = to_xyz @ seen / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(ratios > 0.008856, np.cbrt(ratios), 7.787 * ratios + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def labels(*runs):
    return [style.label for style in styles_of(runs)]


def test_a_label_is_the_name_cut_in_its_middle_and_the_same_one_takes_strategy_dtype_and_id():
    assert labels(run("a"), run("b")) == ["a", "b"]
    [label] = labels(run("first-" + "x" * 500 + "-last"))
    assert (len(label), label[:6], label[-5:]) == (48, "first-", "-last")
    first, *others = labels(run("gpt"), *(run("gpt", "plus", run_id=run_id) for run_id in ("xx1111", "xx2222")))
    assert first == "gpt · Plain · bfloat16"
    assert others == ["gpt · Collage plus · bfloat16 · xx1111", "gpt · Collage plus · bfloat16 · xx2222"]


def test_every_strategy_has_a_colour_that_its_runs_share_and_plain_float32_is_the_reference():
    assert set(STRATEGY_COLOURS) == set(STRATEGIES)
    assert strategy_colour("plain", "float32") == REFERENCE
    assert strategy_colour("plain", "bfloat16") == STRATEGY_COLOURS["plain"]
    assert strategy_colour("from the future") == STRATEGY_COLOURS["unknown"]
    first, second = styles_of([run("a", "plus"), run("b", "plus")])
    assert first.colour == second.colour == STRATEGY_COLOURS["plus"]
    assert first.dash != second.dash


@pytest.mark.parametrize("vision", VISION)
def test_colours_can_be_told_apart_by_colour_blind_readers_too(vision):
    colours = {**STRATEGY_COLOURS, "reference": REFERENCE, "plain, float16": strategy_colour("plain", "float16")}
    seen = {name: lab(colour, VISION[vision]) for name, colour in colours.items()}
    closest = min((float(np.linalg.norm(seen[a] - seen[b])), a, b) for a, b in itertools.combinations(seen, 2))
    assert closest[0] > 12, closest


def test_titles_and_stochastic_strategies():
    assert strategy_title("plus", "bfloat16") == "Collage plus · bfloat16"
    assert strategy_title(None) == "Unknown"
    assert is_stochastic("light-stochastic")
    assert not is_stochastic("plain")
    assert not is_stochastic("split-master"), "beside its < 0.01 % stood that one step misjudges it"
    assert not is_stochastic(None)
