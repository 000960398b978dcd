"""Configurations of optimizers, how their intended update is found, and what is seen of how they keep weights.

`python -m tests.agent.intent.matrix` prints the table of docs/optimizers.md.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import bitsandbytes
import optimi
import pytorch_optimizer
import schedulefree
import torch
import torchao.optim
from collage_optim import CollageAdam, CollageAdamW, CollageLion, CollageSGD
from torch import nn

BF16, FP32 = torch.bfloat16, torch.float32
BOTH = (BF16, FP32)


@dataclass(frozen=True)
class Configuration:
    """kind: where u comes from; strategy: seen with bf16 weights, with others it is plain; matrices: only those."""

    library: str
    name: str
    make: Callable[[Iterable[Any]], torch.optim.Optimizer]
    kind: str
    strategy: str = "plain"
    dtypes: tuple[torch.dtype, ...] = BOTH
    matrices: bool = False
    sparse: bool = False
    closure: bool = False

    @property
    def title(self) -> str:
        return f"{self.library} {self.name}"


def ready(kind: Any, parameters: Any) -> Any:
    """A schedule-free optimizer in its training mode."""
    optimizer = kind(parameters, lr=1e-3)
    optimizer.train()
    return optimizer


T = torch.optim
FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
FUSED = {**FORMS, "fused": {"fused": True}}
ELEMENTWISE: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "SGD": (T.SGD, {"lr": 1e-2}, FUSED),
    "SGD momentum": (T.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}, FUSED),
    "SGD nesterov": (T.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, FORMS),
    "SGD maximize": (T.SGD, {"lr": 1e-2, "maximize": True}, {"": {}}),
    "Adam": (T.Adam, {"weight_decay": 0.1}, FUSED),
    "Adam amsgrad": (T.Adam, {"amsgrad": True}, FORMS),
    "AdamW": (T.AdamW, {"weight_decay": 0.1}, FUSED),
    "AdamW amsgrad": (T.AdamW, {"amsgrad": True}, {"fused": {"fused": True}}),
    "NAdam": (T.NAdam, {}, FORMS),
    "RAdam": (T.RAdam, {}, FORMS),
    "Adamax": (T.Adamax, {}, FORMS),
    "Adagrad": (T.Adagrad, {}, FUSED),
    "Adadelta": (T.Adadelta, {}, FORMS),
    "RMSprop": (T.RMSprop, {}, FORMS),
    "RMSprop centered momentum": (T.RMSprop, {"centered": True, "momentum": 0.9}, FORMS),
    "ASGD": (T.ASGD, {}, FORMS),
    "Rprop": (T.Rprop, {}, FORMS),
}


def torch_configurations() -> list[Configuration]:
    found = []
    for name, (kind, options, forms) in ELEMENTWISE.items():
        for form, switches in forms.items():
            title = f"{name}, {form}" if form else name
            settings = {**options, **switches}
            found.append(Configuration("torch", title, partial(kind, **settings), "shadow"))
    adafactor = Configuration("torch", "Adafactor", partial(T.Adafactor, lr=1e-2), "whole-tensor")
    muon = Configuration("torch", "Muon", partial(T.Muon, lr=1e-2), "whole-tensor", matrices=True)
    sparse = Configuration("torch", "SparseAdam", T.SparseAdam, "shadow", "plain", dtypes=(FP32,), sparse=True)
    lbfgs = Configuration("torch", "LBFGS", T.LBFGS, "before-after", "unknown", dtypes=(FP32,), closure=True)
    return [*found, adafactor, muon, sparse, lbfgs]


def of_library(library: Any, name: str, kind: str, strategy: str = "plain", title: str = "", **options: Any) -> Any:
    """One of its optimizers by name, at a rate of 1e-3; the title says more where the name does not tell."""
    make = partial(getattr(library, name), lr=1e-3, **options)
    dtypes = (BF16,) if strategy == "stochastic" else BOTH
    return Configuration(library.__name__.partition(".")[0], title or name, make, kind, strategy, dtypes)


def optimi_configurations() -> list[Configuration]:
    return [
        *(
            of_library(optimi, name, "shadow", strategy, name + suffix, kahan_sum=strategy == "kahan")
            for name in ("AdamW", "Adam", "SGD", "Lion", "RAdam", "Adan", "Ranger")
            for strategy, suffix in (("kahan", ", Kahan"), ("plain", ""))
        ),
        of_library(optimi, "StableAdamW", "whole-tensor", "kahan", "StableAdamW, Kahan"),
    ]


def torchao_configurations() -> list[Configuration]:
    library, rounding = torchao.optim, "AdamW8bit, stochastic rounding"
    return [
        *(of_library(library, name, "shadow") for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
        of_library(library, "AdamW8bit", "shadow", "stochastic", rounding, bf16_stochastic_round=True),
    ]


def bitsandbytes_configurations() -> list[Configuration]:
    library = bitsandbytes.optim
    return [
        *(of_library(library, name, "rule", "fp32-states") for name in ("AdamW", "Lion", "RMSprop", "Adagrad")),
        *(of_library(library, name, "rule") for name in ("AdamW8bit", "Lion8bit", "RMSprop8bit")),
        of_library(library, "SGD", "rule", "fp32-states", momentum=0.9),
        of_library(library, "SGD8bit", "rule", momentum=0.9),
        of_library(library, "LAMB", "before-after", "fp32-states"),
    ]


def schedule_free_configurations() -> list[Configuration]:
    kinds = (schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree, schedulefree.RAdamScheduleFree)
    return [Configuration("schedulefree", kind.__name__, partial(ready, kind), "shadow") for kind in kinds]


def pytorch_optimizer_configurations() -> list[Configuration]:
    kinds = {
        "shadow": ("Lion", "AdEMAMix", "Adan", "Tiger", "ADOPT", "LaProp", "Grams"),
        "whole-tensor": ("Lamb", "LARS", "AdamP", "NovoGrad", "CAME", "SM3"),
        "whole-optimizer": ("Prodigy", "DAdaptAdam"),
    }
    found = [
        Configuration("pytorch_optimizer", name, getattr(pytorch_optimizer, name), kind)
        for kind, names in kinds.items()
        for name in names
    ]
    stable = pytorch_optimizer.StableAdamW
    kahan = Configuration("pytorch_optimizer", "StableAdamW, Kahan", stable, "whole-tensor", "kahan")
    return [*found, kahan]


def our_configurations() -> list[Configuration]:
    strategies = ("plain", "stochastic", "kahan", "light", "light-stochastic", "plus", "full", "master-weights")
    pairs: list[tuple[Any, str]] = [(CollageAdamW, strategy) for strategy in strategies]
    found = []
    for kind, strategy in (*pairs, (CollageAdam, "plus"), (CollageLion, "light"), (CollageSGD, "light")):
        make = partial(kind, lr=1e-3, strategy=strategy)
        title = f"{kind.__name__}, {strategy}"
        found.append(Configuration("ours", title, make, "rule", strategy, dtypes=(BF16,)))
    return found


CONFIGURATIONS = [
    *torch_configurations(),
    *optimi_configurations(),
    *torchao_configurations(),
    *bitsandbytes_configurations(),
    *schedule_free_configurations(),
    *pytorch_optimizer_configurations(),
    *our_configurations(),
]

CASES = [(entry, dtype) for entry in CONFIGURATIONS for dtype in entry.dtypes]


def model(entry: Configuration, dtype: torch.dtype) -> Any:
    """Three tensors, one of them large enough for quantised states."""
    torch.manual_seed(0)
    if entry.sparse:
        return nn.EmbeddingBag(64, 64, sparse=True, dtype=dtype)
    return nn.Sequential(nn.Linear(64, 64, bias=not entry.matrices), nn.Linear(64, 5, bias=False)).to(dtype)


def table() -> list[str]:
    """The rows of the table: library, optimizer, dtypes of weights, where u comes from, strategy seen in bf16."""
    rows = ["| library | optimizer | weights | u from | seen in bf16 |", "|---|---|---|---|---|"]
    for entry in CONFIGURATIONS:
        dtypes = ", ".join("bf16" if dtype == BF16 else "fp32" for dtype in entry.dtypes)
        seen = entry.strategy if BF16 in entry.dtypes else "–"
        rows.append(f"| {entry.library} | {entry.name} | {dtypes} | {entry.kind} | {seen} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))  # noqa: T201
