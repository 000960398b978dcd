"""Advice over every optimizer, dtype, gradient and size: whoever follows it is healthy, and no worse than before.

A training that loses nothing is told nothing. An optimizer that refuses sparse gradients has SparseAdam beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import optimi
import pytest
import pytorch_optimizer
import torch
from collage_optim import CollageAdamW

from tests.agent.intent.optimizers import OwnAdamW
from tests.agent.watching import test_advice as advice

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Kind:
    """An optimizer, its rates beside bf16 and fp16, what else it takes beside fp16, whose 1e-8 is 0, and the dtypes
    in which it takes sparse gradients."""

    build: Callable[..., torch.optim.Optimizer]
    rates: tuple[float, float]
    beside_fp16: tuple[tuple[str, Any], ...] = (("eps", 1e-4),)
    sparse: tuple[torch.dtype, ...] = ()
    unknown: bool = False


def ours_plain(parameters, **options):
    return advice.ours(CollageAdamW, "plain", **options)(parameters)


T = torch.optim
SPARSE_ADAM = Kind(T.SparseAdam, (1e-4, 1e-5))
KINDS = {
    "SGD": Kind(T.SGD, (1e-3, 1e-4), (), (BF16, FP16, FP32)),
    "SGD momentum": Kind(partial(T.SGD, momentum=0.9), (1e-3, 1e-4), (), (BF16, FP32)),
    "Adagrad": Kind(T.Adagrad, (1e-4, 1e-5), sparse=(BF16, FP16, FP32)),
    "AdamW": Kind(T.AdamW, (1e-4, 1e-5)),
    "Adam amsgrad": Kind(partial(T.Adam, amsgrad=True), (1e-4, 1e-5)),
    "NAdam": Kind(partial(T.NAdam, betas=(0.9, 0.95)), (1e-5, 3e-6)),
    "RAdam": Kind(partial(T.RAdam, betas=(0.9, 0.95)), (1e-5, 3e-6)),
    "Adamax": Kind(T.Adamax, (1e-4, 1e-5)),
    "RMSprop": Kind(partial(T.RMSprop, alpha=0.9), (1e-5, 3e-6)),
    "Adafactor": Kind(T.Adafactor, (1e-4, 1e-5), (), unknown=True),
    "Lion": Kind(partial(pytorch_optimizer.Lion, weight_decay=0.0), (1e-5, 1e-6), ()),
    "AdamW by another hand": Kind(OwnAdamW, (1e-4, 1e-5)),
    "optimi's Lion": Kind(partial(optimi.Lion, kahan_sum=False), (1e-5, 1e-6), ()),
    "optimi's Adam": Kind(partial(optimi.Adam, kahan_sum=False), (1e-4, 1e-5)),
    "a rule of its own": Kind(advice.SignedMomentum, (1e-4, 1e-4), ()),
    "ours": Kind(ours_plain, (1e-4, 1e-5)),
}
DTYPES = {"bf16": (BF16, None), "fp16": (FP16, None), "fp32": (FP32, None), "bf16, norm in fp32": (BF16, FP32)}
SIZES = {"small": (12, 8, 16), "middle": (60, 16, 48), "sampled": (600, 32, 160)}


def case_of(kind, dtype, gradients, size):
    own, (weights, norm) = KINDS[kind], DTYPES[dtype]

    def make(of):
        options = dict(of.beside_fp16) if weights == FP16 else {}
        return lambda parameters: of.build(parameters, lr=of.rates[weights == FP16], **options)

    sparse = gradients == "sparse"
    return advice.Case(
        f"{kind}, {dtype}, {gradients}, {size}",
        make(own),
        dtype=weights,
        sparse=sparse,
        norm=norm,
        unknown=own.unknown,
        rows=make(SPARSE_ADAM) if sparse and weights not in own.sparse else None,
        size=SIZES[size],
        sample=2048 if size == "sampled" else "all",
    )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.drawn(by=lambda kind, dtype, gradients, size: (gradients, size))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gradients", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_advice_is_good(kind, dtype, gradients, size):
    case = case_of(kind, dtype, gradients, size)
    model = advice.model_of(case)
    before = advice.train(case, model, advice.optimizers_of(case, list(model.parameters())))
    if before.judgement.health == "healthy":
        assert before.judgement.advice == []
        assert min(before.shares.values()) > 0.9, before
    elif not case.unknown:
        assert any(entry.choices for entry in before.judgement.advice), before
    advice.hold_to_advice(case, before)
