"""The studies by name, in the order in which they are read."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from collage_studies.study import Study

__all__ = ["STUDY_NAMES", "study_named"]

_MODULES: Final = {
    "expansions": "expansions",
    "accumulation": "accumulation",
    "strategies": "strategies",
    "layers": "layers",
    "beta2": "beta2",
    "counterfactuals": "counterfactuals",
    "finetuning": "finetuning",
    "beyond-adamw": "beyond_adamw",
    "eight-bit": "eight_bit",
    "coupled-rounding": "coupled_rounding",
    "quality": "quality",
    "memory": "memory",
    "diary": "diary",
}
STUDY_NAMES: Final = tuple(_MODULES)


def study_named(name: str) -> Study:
    """The study; its module is imported now.

    Raises:
        KeyError: no study is called so.
    """
    study: Study = import_module(f"collage_studies.studies.{_MODULES[name]}").STUDY
    return study
