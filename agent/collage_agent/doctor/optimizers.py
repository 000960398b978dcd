"""Check of the optimizer libraries that are installed: how each one's steps are followed, as far as was tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal

from collage_agent.doctor.checks import Check

__all__ = ["TRIED", "Tried", "optimizer_checks"]

_USUALLY: Final = {
    "shadow": "a sample of every tensor is stepped again in fp64",
    "rule": "a sample of every tensor, by fp64 formulas of ours",
}


@dataclass(frozen=True)
class Tried:
    """What was seen of one library: where u usually comes from, and which optimizers are followed otherwise."""

    distribution: str
    usually: Literal["shadow", "rule"]
    whole_tensor: tuple[str, ...] = ()
    before_after: tuple[str, ...] = ()


TRIED: Final = {
    "torch": Tried("torch", "shadow", ("Adafactor", "Muon"), ("SparseAdam", "LBFGS")),
    "optimi": Tried("torch-optimi", "shadow", ("StableAdamW",)),
    "torchao": Tried("torchao", "shadow"),
    "bitsandbytes": Tried("bitsandbytes", "rule", (), ("LAMB",)),
    "schedulefree": Tried("schedulefree", "shadow"),
    "pytorch_optimizer": Tried(
        "pytorch_optimizer",
        "shadow",
        ("Lamb", "LARS", "AdamP", "NovoGrad", "CAME", "SM3", "StableAdamW"),
        ("Prodigy", "DAdaptAdam"),
    ),
}
"""By the library's name in docs/optimizers.md."""


def optimizer_checks() -> Iterator[Check]:
    """One check for each library that is installed. Imports and steps nothing."""
    for library, tried in TRIED.items():
        try:
            text = f"{library} {version(tried.distribution)}: {_USUALLY[tried.usually]}"
        except PackageNotFoundError:
            continue
        if tried.whole_tensor:
            text += f"; whole tensors in turns: {', '.join(tried.whole_tensor)}"
        if tried.before_after:
            text += f"; only what changed, not what was lost: {', '.join(tried.before_after)}"
        yield Check("optimizers", "ok", text)
    yield Check(
        "optimizers", "ok", "any other: a self-test at attach decides, and the run says what it found and why"
    )
