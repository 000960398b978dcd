"""What a run is told to try is tried: built as told, stepped, judged, held against fp64, its bytes counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_optimizer
import torch
from collage_agent.handle import watch
from collage_optim import CollageAdam, CollageAdamW, CollageLion, CollageOptimizer, CollageSGD
from torch import nn

from collage_monitor.judgement import Judgement

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = 60


class SignedMomentum(torch.optim.Optimizer):
    """A rule that nobody else has."""

    def __init__(self, params: Any, lr: float, power: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (own for own in group["params"] if own.grad is not None):
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.mul_(0.9).add_(parameter.grad, alpha=0.1)
                parameter.sub_(average.sign() * average.abs() ** group["power"] * group["lr"])


class OwnAdamW(torch.optim.Optimizer):
    """AdamW by another hand, under another name."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (one, two), rate = group["betas"], group["lr"]
            for parameter in (own for own in group["params"] if own.grad is not None):
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state.update(step=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter))
                state["step"] += 1
                state["m"].mul_(one).add_(gradient, alpha=1 - one)
                state["v"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
                root = (state["v"] / (1 - two ** state["step"])).sqrt().add_(group["eps"])
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.addcdiv_(state["m"], root, value=-rate / (1 - one ** state["step"]))


@dataclass(frozen=True)
class Case:
    """A training that loses something, and which strategies it may be told (None: fp32 weights)."""

    name: str
    make: Callable[[Any], torch.optim.Optimizer]
    told: tuple[str | None, ...]
    dtype: torch.dtype = BF16
    sparse: bool = False
    norm: torch.dtype | None = None
    matrices: bool = False
    embedding: bool = False
    unknown: bool = False
    """No observer can vouch for it: states of rows and columns, or elements that mix."""


T = torch.optim
IN_12_AND_8 = ("split-master", "split-master-8bit")
WITHOUT_SECOND = ("split-master", "split-24bit-8bit")


def ours(
    kind: Callable[..., CollageOptimizer], strategy: str, **options: Any
) -> Callable[[Any], torch.optim.Optimizer]:
    def make(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        kept = "plain" if params[0].dtype.itemsize > 2 else strategy
        return kind(params, strategy=kept, **options)

    return make


CASES = (
    Case("SGD", lambda p: T.SGD(p, lr=1e-3), ("split-master",)),
    Case("SGD momentum", lambda p: T.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1), WITHOUT_SECOND),
    Case("SGD nesterov fp16", lambda p: T.SGD(p, lr=1e-4, momentum=0.9, nesterov=True), ("master-weights",), FP16),
    Case("SGD sparse", lambda p: T.SGD(p, lr=1e-3), ("split-master",), sparse=True),
    Case("SGD momentum sparse", lambda p: T.SGD(p, lr=1e-3, momentum=0.9), WITHOUT_SECOND, sparse=True),
    Case("AdamW", lambda p: T.AdamW(p, lr=1e-4), IN_12_AND_8),
    Case("AdamW fp16", lambda p: T.AdamW(p, lr=1e-5, eps=1e-4), ("master-weights",), FP16),
    Case("AdamW, norm in fp32", lambda p: T.AdamW(p, lr=1e-4), IN_12_AND_8, norm=FP32),
    Case("Adam amsgrad", lambda p: T.Adam(p, lr=1e-4, amsgrad=True), IN_12_AND_8),
    Case("AdamW by another hand", lambda p: OwnAdamW(p, lr=1e-4), IN_12_AND_8),
    Case("Lion", lambda p: pytorch_optimizer.Lion(p, lr=1e-5, weight_decay=0.0), WITHOUT_SECOND),
    Case("Adagrad", lambda p: T.Adagrad(p, lr=1e-4), (None,)),
    Case("Adagrad sparse", lambda p: T.Adagrad(p, lr=1e-4), (None,), sparse=True),
    Case("SparseAdam", lambda p: T.SparseAdam(p, lr=1e-4), (None,), sparse=True, embedding=True),
    Case("RMSprop", lambda p: T.RMSprop(p, lr=1e-5, alpha=0.9), (None,)),
    Case("RMSprop fp16", lambda p: T.RMSprop(p, lr=3e-6, alpha=0.9, eps=1e-4), (None,), FP16),
    Case("NAdam", lambda p: T.NAdam(p, lr=1e-5, betas=(0.9, 0.95)), (None,)),
    Case("Adafactor", lambda p: T.Adafactor(p, lr=1e-4), (None,), unknown=True),
    Case("Muon", lambda p: T.Muon(p, lr=1e-4), (None,), matrices=True, unknown=True),
    Case("a rule of its own", lambda p: SignedMomentum(p, lr=1e-4), (None,)),
    Case("ours, plain", ours(CollageAdamW, "plain", lr=1e-4), IN_12_AND_8),
    Case("ours, kahan", ours(CollageAdamW, "kahan", lr=3e-4), ("split-master", "split-master-16bit")),
    Case("ours, light", ours(CollageAdamW, "light", lr=3e-4), ("split-master", "split-master-16bit")),
    Case("ours, plus", ours(CollageAdamW, "plus", lr=1e-7), ("split-master",)),
    Case("ours, fp32-states", ours(CollageAdam, "fp32-states", lr=1e-4), ("split-master",)),
    Case("our Lion, plain", ours(CollageLion, "plain", lr=1e-5), WITHOUT_SECOND),
    Case("our Lion, plain fp16", ours(CollageLion, "plain", lr=1e-6), ("master-weights",), FP16),
    Case("our SGD, plain", ours(CollageSGD, "plain", lr=1e-3), ("split-master",)),
)


def model_of(case: Case) -> Any:
    torch.manual_seed(3)
    if case.embedding:
        return nn.Sequential(nn.Embedding(TOKENS, 5, sparse=case.sparse)).to(case.dtype)
    layers = [nn.Linear(16, 48, bias=False), nn.GELU(), nn.Linear(48, 5, bias=False)]
    if case.norm is not None:
        layers.insert(1, nn.LayerNorm(48))
    embedding = [] if case.matrices else [nn.Embedding(TOKENS, 16, sparse=case.sparse)]
    model = nn.Sequential(*embedding, *layers).to(case.dtype)
    for layer in model if case.norm is not None else ():
        if isinstance(layer, nn.LayerNorm):
            layer.to(case.norm)
            layer.register_forward_pre_hook(lambda own, given: given[0].to(own.weight.dtype))
            layer.register_forward_hook(lambda own, given, found: found.to(case.dtype))
    return model


def stored(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    known = isinstance(optimizer, CollageOptimizer)
    return (optimizer.stored_parameter(parameter) if known else parameter.detach().double()).clone()


def counted(model: nn.Module, optimizer: Any) -> float:
    """Bytes a parameter of weights, gradients and states, from the tensors that there are."""
    parameters = list(model.parameters())
    kept = [*parameters, *(own.grad for own in parameters if own.grad is not None and not own.grad.is_sparse)]
    for state in optimizer.state.values():
        kept += [value for value in state.values() if isinstance(value, torch.Tensor) and value.numel() > 1]
    return sum(value.numel() * value.element_size() for value in kept) / sum(map(torch.numel, parameters))


@dataclass
class Trained:
    share: float
    size: float
    judgement: Judgement


def train(case: Case, model: Any, optimizer: Any, steps: int) -> Trained:
    """Trains under the agent, with an fp64 optimizer of the same rule fed the same gradients beside it."""
    handle = watch(model, optimizer, every=10, sample="all", oracle=True, windows=(64,), budget=None)
    parameters = list(model.parameters())
    start = [own.detach().double().clone() for own in parameters]
    exact = [own.clone().requires_grad_() for own in start]
    twin, size = case.make(exact), 0.0
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, TOKENS, (64,), generator=generator)
        given = tokens
        if case.matrices:
            given = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(99))[tokens].to(parameters[0])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(given).float(), tokens % 5).backward()
        for own, other in zip(parameters, exact, strict=True):
            other.grad = None if own.grad is None else own.grad.double()
        optimizer.step()
        twin.step()
        size = counted(model, optimizer) if step == steps - 1 else 0.0
    meant = torch.cat([(own.detach() - old).flatten() for own, old in zip(exact, start, strict=True)])
    moved = torch.cat(
        [(stored(optimizer, own) - old).flatten() for own, old in zip(parameters, start, strict=True)]
    )
    found = Trained(float(meant @ moved / (meant @ meant)), size, handle.judgement())
    handle.remove()
    return found


def check(case: Case, steps: int) -> None:
    model = model_of(case)
    before = train(case, model, case.make(model.parameters()), steps)
    [advice] = before.judgement.advice
    assert tuple(choice.strategy for choice in advice.choices) == case.told, before.judgement
    for choice in advice.choices:
        names: dict[str, Any] = {"model": model_of(case)}
        if choice.strategy is not None:
            names["optimizer"] = case.make(names["model"].parameters())
        exec(choice.code, names)
        model = names["model"]
        after = train(case, model, names.get("optimizer") or case.make(model.parameters()), steps)
        assert after.judgement.health in ("healthy", *(["unknown"] if case.unknown else [])), after.judgement
        assert after.share > min(before.share, 1.0) - 1e-3
        assert abs(after.share - 1) < 0.02
        assert choice.bytes_per_parameter == pytest.approx(after.size, abs=0.1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.drawn(
    by=lambda case: (case.told, case.dtype, case.sparse, case.norm, case.matrices, case.embedding, case.unknown)
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_advised_is_built_healthy_no_worse_and_as_large_as_told(case):
    check(case, 200)
