"""Ways to keep a weight: who keeps it so, how such an optimizer is made, and which of its states can be broken."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import bitsandbytes
import optimi
import torch
import torchao.optim
from collage_optim import STRATEGIES, CollageAdamW
from pytorch_optimizer import StableAdamW
from schedulefree import AdamWScheduleFree

from tests.keepers import replicas

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = (BF16, FP16)
RATES = {BF16: 1e-4, FP16: 1e-5}
"""Far below a gap of the weights: what keeps nothing loses most of such updates."""
STUCK = {BF16: 0.999, FP16: 0.9999}


@dataclass(frozen=True)
class Way:
    """One way to keep a weight.

    who: a package, "ours", or "replica of …". make(parameters, lr, betas) makes the optimizer; betas None: it has
    none. seen: the strategy that is observed. completes: the state that completes the weight, by key. faults: what
    a replica can break in its own step. stuck: dtypes of weights beside which a second moment can be stuck. loses:
    nothing is kept, so that such updates are lost. off: dtypes in which its own arithmetic is off, against a run of
    it in fp64. weights: the dtype of the weights that it steps, None: the model's. masters: those are copies, from
    which the model's are cast. decoupled: it steps `decoupled_grad`.
    """

    name: str
    who: str
    make: Callable[..., torch.optim.Optimizer]
    seen: str
    completes: str | None = None
    faults: tuple[str, ...] = ()
    stuck: tuple[torch.dtype, ...] = ()
    loses: bool = False
    off: tuple[torch.dtype, ...] = ()
    dtypes: tuple[torch.dtype, ...] = BOTH
    weights: torch.dtype | None = None
    masters: bool = False
    decoupled: bool = False


FAULTS = ("sign", "frozen")
INTEGERS = "integer-remainder"
WIDE: dict[str, Any] = {"stuck": (), "weights": FP32, "dtypes": (FP32,)}
"""Steps fp32 weights."""
AT_RANDOM: dict[str, Any] = {"stuck": (), "dtypes": (BF16,), "bf16_stochastic_round": True}
UNDECAYED = {"weight_decay": 0.0}
"""A decay is a product in the weight's dtype: that it is lost is another matter."""


def replica(kind, who, seen, **more):
    def make(parameters, lr, betas, fault=None):
        # Averages in the weight's own 16 bits, where only they can make a second moment that is stuck.
        wide = betas[1] < 0.99
        parameters = list(parameters)
        states = FP32 if wide else parameters[0].dtype
        return kind(parameters, lr=lr, betas=betas, states=states, fault=fault)

    # Nobody knows of a scrambled weight what completes it, and a master is the weight itself.
    completes = kind.key if seen in (INTEGERS, "kahan") else None
    faults = () if completes is None else FAULTS
    more["decoupled"] = kind is replicas.PrecisionAware
    return Way(kind.__name__, f"replica of {who}", make, seen, completes, faults, stuck=BOTH, **more)


def ours(strategy):
    known = STRATEGIES[strategy]
    single = known.second_moment.name == "SINGLE" and not known.stochastic
    return Way(
        f"CollageAdamW, {strategy}",
        "ours",
        lambda parameters, lr, betas: CollageAdamW(parameters, lr=lr, betas=betas, strategy=strategy),
        strategy,
        known.parameter_state if known.parameter_state != "master_parameter" else None,
        stuck=BOTH if single else (),
        loses=strategy in ("plain", "fp32-states"),
        dtypes=(BF16,) if strategy not in ("kahan", "light", "master-weights", "fp32-states", "plain") else BOTH,
    )


def package(name, who, kind, seen, *, stuck=BOTH, loses=False, off=(), dtypes=BOTH, weights=None, **settings):
    def make(parameters, lr, betas):
        given = {} if betas is None else {"betas": betas}
        optimizer = kind(parameters, lr=lr, **given, **settings)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    completes = "kahan_comp" if seen == "kahan" else None
    return Way(name, who, make, seen, completes, (), stuck, loses, off, dtypes, weights)


class Averaged(torch.optim.AdamW):
    """AdamW with an exponential moving average of the weights in its state: a copy to evaluate with."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state: dict[str, Any] = self.state[parameter]
                if "ema" not in state:
                    state["ema"] = parameter.float().clone()
                state["ema"].lerp_(parameter.float(), 0.01)


class KahanAveraged(replicas.Kahan):
    """Kahan's compensation beside an average of the visible weights in the weight's dtype."""

    def store(self, parameter, state, weight, *, frozen):
        super().store(parameter, state, weight, frozen=frozen)
        if "swa" not in state:
            state["swa"] = parameter.clone()
        state["swa"].lerp_(parameter, 0.2)


def ways() -> list[Way]:
    """All of them, ours first."""
    return [
        *(ours(strategy) for strategy in STRATEGIES),
        replica(replicas.Appended, "split fp32: 16 bits appended, int16", INTEGERS),
        replica(replicas.AppendedUnsigned, "modded-nanogpt: mantissa, uint16", INTEGERS),
        replica(replicas.Rounded, "TransformerEngine FusedAdam, store_param_remainders", INTEGERS),
        replica(replicas.PrecisionAware, "Megatron-Core, precision-aware optimizer with decoupled_grad", INTEGERS),
        replica(replicas.Fraction, "FlashOptim, 24 bits", INTEGERS),
        replica(replicas.Fraction16, "FlashOptim, 32 bits", INTEGERS),
        replica(replicas.Kahan, "a compensation that is added", "kahan"),
        replica(replicas.Subtracted, "the textbook's compensation, subtracted", "kahan"),
        replica(replicas.Master, "TransformerEngine FusedAdam, fp32 master_weights", "master-weights"),
        replica(KahanAveraged, "an average of weights (SWA) beside a compensation", "kahan"),
        replica(replicas.Scrambled, "nobody: bits in an order of their own", "unknown", dtypes=(BF16,)),
        Way(
            "fp32 masters in shards",
            "replica of Megatron's distributed optimizer, DeepSpeed",
            lambda parameters, lr, betas: torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=0.0),
            "plain",
            weights=FP32,
            masters=True,
        ),
        package("AdamW", "torch", torch.optim.AdamW, "plain", loses=True, eps=1e-6, **UNDECAYED),
        package("AdamW, fp32", "torch", torch.optim.AdamW, "plain", **WIDE),
        package("AdamW with an EMA copy", "torch", Averaged, "plain", loses=True, eps=1e-6, **UNDECAYED),
        package("AdamW with an EMA copy, fp32", "torch", Averaged, "plain", **WIDE),
        package("AdamW, Kahan", "optimi", optimi.AdamW, "kahan", **UNDECAYED),
        package("Lion, Kahan", "optimi", partial(optimi.Lion, betas=(0.9, 0.99)), "kahan", stuck=()),
        # In fp16 its eps² is 0: against fp64 its first step is 1.34 times too long, the cosine of 16 is 0.84.
        package("StableAdamW, Kahan", "optimi", optimi.StableAdamW, "kahan", off=(FP16,), **UNDECAYED),
        package("AdamW without Kahan", "optimi", optimi.AdamW, "plain", loses=True, kahan_sum=False),
        # Beside fp16 its second moment is fp32.
        package("StableAdamW, Kahan", "pytorch_optimizer", StableAdamW, "kahan", stuck=(BF16,), **UNDECAYED),
        package("AdamW8bit, stochastic rounding", "torchao", torchao.optim.AdamW8bit, "stochastic", **AT_RANDOM),
        package("AdamW8bit", "torchao", torchao.optim.AdamW8bit, "plain", stuck=(), loses=True),
        package("AdamW", "bitsandbytes", bitsandbytes.optim.AdamW, "fp32-states", stuck=(), loses=True),
        package("AdamW8bit", "bitsandbytes", bitsandbytes.optim.AdamW8bit, "plain", stuck=(), loses=True),
        package("AdamWScheduleFree, fp32", "schedulefree", AdamWScheduleFree, "plain", **WIDE),
        package("AdamWScheduleFree", "schedulefree", AdamWScheduleFree, "plain", loses=True, eps=1e-6),
    ]
