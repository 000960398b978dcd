"""The words of a verdict, and how numbers read in sentences.

Names of verdicts are fixed (alerts, filters and scripts use them), sentences are free: raise `WORDS_VERSION` with
them, and servers make their overviews again.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from collage_monitor.diagnosis.evidence import SilentRanks
from collage_monitor.wire.messages import Coverage
from collage_monitor.wire.overview import NO_PROBLEM

__all__ = [
    "CAVEATS",
    "GRAVITY",
    "Health",
    "MADE_BY_THE_STEP",
    "NO_PROBLEM",
    "WORDS_VERSION",
    "gravity",
    "is_named_by_group",
    "oracle_reach",
    "orphans",
    "percent",
    "sentence",
    "silence",
]

WORDS_VERSION: Final = 14
"""Raise it when a run may be judged or headlined otherwise than before while the package's version stays: what
servers keep is then made again."""
Health = Literal[
    "healthy",
    "not finite",
    "losing updates",
    "states are stuck",
    "decay is lost",
    "residuals are off",
    "steps are off",
    "average is off",
    "unknown",
]
GRAVITY: Final[tuple[Health, ...]] = (
    "not finite",
    "losing updates",
    "states are stuck",
    "decay is lost",
    "residuals are off",
    "steps are off",
    "average is off",
)
"""Bad words, the gravest first."""
_PLACES: Final[dict[str, int]] = {word: place for place, word in enumerate((*GRAVITY, "unknown", "healthy"))}
MADE_BY_THE_STEP: Final = "the gradients were finite, so the step made them"
_NEARLY_ALL: Final = 0.995
_NAMED_BY_GROUP: Final = re.compile(r"(optimizer\d+\.)?group\d+\.\d+")
CAVEATS: Final = (
    "What is lost before the optimizer (gradients accumulated or reduced in low precision) is invisible here. "
    "float64 parameters cannot be measured. Sampling can miss a rare row of a large embedding."
)
"""Stated wherever the numbers are shown."""


def is_named_by_group(layer: str) -> bool:
    """Whether a tensor goes by its place in the optimizer: the model does not know it."""
    return _NAMED_BY_GROUP.fullmatch(layer) is not None


def oracle_reach(share: float) -> str:
    """', of 43.1 % of the elements', of an oracle that does not follow all; else nothing."""
    return f", of {percent(share)} of the elements" if share < _NEARLY_ALL else ""


def orphans(coverage: Coverage) -> str:
    """'0.weight (1,920 elements) gets gradients and is in no optimizer'."""
    more = ", …" if coverage.orphaned and len(coverage.orphans) > 1 else ""
    verb = "get gradients and are" if len(coverage.orphans) > 1 else "gets gradients and is"
    return f"{', '.join(coverage.orphans)}{more} ({coverage.orphaned:,} elements) {verb} in no optimizer"


def silence(silent: SilentRanks) -> str:
    """'2 of 4 ranks report since step 500'."""
    return f"{silent.reporting} of {silent.expected} ranks report since step {silent.since:,}"


def sentence(text: str) -> str:
    """With a capital, except where it begins with a name of the code's, and a full stop."""
    named = "_" in text.split(" ", 1)[0]
    return f"{text if named else text[:1].upper() + text[1:]}."


def gravity(health: str) -> int:
    """The place of a health when the gravest come first; a word of another version comes last."""
    return _PLACES.get(health, len(_PLACES))


def percent(share: float) -> str:
    """A share as it reads everywhere: one decimal, two where one would say 0 or all of it; 0 and 1 are exact."""
    if share in (0.0, 1.0):
        return f"{100 * abs(share):.0f} %"
    for digits in (1, 2):
        text = f"{100 * share:,.{digits}f}"
        if float(text.replace(",", "")) not in (0.0, 100.0):
            return f"{text} %"
    return "< 0.01 %" if share < 0.5 else "> 99.99 %"
