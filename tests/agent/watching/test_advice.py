"""What a run is told to try is tried: built as told, stepped, judged, held against fp64, its bytes counted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import bitsandbytes
import optimi
import pytest
import pytorch_optimizer
import torch
from collage_agent.handle import watch
from collage_optim import CollageAdam, CollageAdamW, CollageLion, CollageSGD
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from collage_monitor.wire import Judgement
from tests.agent.intent.optimizers import ByParameter, OwnAdamW
from tests.agent.training import train as train_steps
from tests.agent.training import watched

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 80
"""Five windows of 16 steps."""


class SignedMomentum(ByParameter):
    """A rule that nobody else has."""

    def __init__(self, params, lr, power=0.5):
        super().__init__(params, lr, power=power)

    def step_one(self, parameter, group):
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        average.mul_(0.9).add_(parameter.grad, alpha=0.1)
        parameter.sub_(average.sign() * average.abs() ** group["power"] * group["lr"])


@dataclass(frozen=True)
class Case:
    """A training that loses something, and which strategies it may be told (None: fp32 weights)."""

    name: str
    make: Callable[[Any], torch.optim.Optimizer]
    told: tuple[str | None, ...] = ()
    dtype: torch.dtype = BF16
    sparse: bool = False
    norm: torch.dtype | None = None
    matrices: bool = False
    embedding: bool = False
    unknown: bool = False
    """No observer can vouch for it: states of rows and columns, or elements that mix."""
    rows: Callable[[Any], torch.optim.Optimizer] | None = None
    """What trains an embedding with sparse gradients, where `make` refuses them."""
    size: tuple[int, int, int] = (60, 16, 48)
    """Tokens, width and hidden width."""
    sample: Any = "all"


T = torch.optim
IN_12_AND_8 = ("split-master", "coupled-8")
WITHOUT_SECOND = ("split-master", "split-24bit-8bit")


def ours(kind, strategy, **options):
    """So kept where weights are of 16 bits; an fp64 twin is plain."""

    def make(params):
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
    Case("AdamW, fast", lambda p: T.AdamW(p, lr=1e-4, betas=(0.9, 0.95)), ("split-master", "split-master-8bit")),
    Case("AdamW fp16", lambda p: T.AdamW(p, lr=1e-5, eps=1e-4), ("master-weights",), FP16),
    Case("AdamW, norm in fp32", lambda p: T.AdamW(p, lr=1e-4), IN_12_AND_8, norm=FP32),
    Case("Adam amsgrad", lambda p: T.Adam(p, lr=1e-4, amsgrad=True), IN_12_AND_8),
    Case("AdamW by another hand", lambda p: OwnAdamW(p, lr=1e-4), ("split-master", "split-master-8bit")),
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
    Case("ours, kahan", ours(CollageAdamW, "kahan", lr=3e-4), ("split-master", "coupled-9")),
    Case("ours, light", ours(CollageAdamW, "light", lr=3e-4), ("split-master", "coupled-9")),
    Case("ours, plus", ours(CollageAdamW, "plus", lr=3e-8), ("split-master",)),
    Case("ours, fp32-states", ours(CollageAdam, "fp32-states", lr=1e-4), ("split-master",)),
    Case("our Lion, plain", ours(CollageLion, "plain", lr=1e-5), WITHOUT_SECOND),
    Case("our Lion, plain fp16", ours(CollageLion, "plain", lr=1e-6), ("master-weights",), FP16),
    Case("our SGD, plain", ours(CollageSGD, "plain", lr=1e-3), ("split-master",)),
)


def model_of(case):
    torch.manual_seed(3)
    tokens, width, hidden = case.size
    if case.embedding:
        return nn.Sequential(nn.Embedding(tokens, 5, sparse=case.sparse)).to(case.dtype)
    layers = [nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, 5, bias=False)]
    if case.norm is not None:
        layers.insert(1, nn.LayerNorm(hidden))
    embedding = [] if case.matrices else [nn.Embedding(tokens, width, sparse=case.sparse)]
    model = nn.Sequential(*embedding, *layers).to(case.dtype)
    for layer in model if case.norm is not None else ():
        if isinstance(layer, nn.LayerNorm):
            layer.to(case.norm)
            layer.register_forward_pre_hook(lambda own, given: given[0].to(own.weight.dtype))
            layer.register_forward_hook(lambda own, given, found: found.to(case.dtype))
    return model


def optimizers_of(case, parameters):
    """For the parameters in the model's order, the embedding first."""
    if case.rows is None:
        return [case.make(parameters)]
    return [case.make(parameters[1:]), case.rows(parameters[:1])]


def counted(optimizer):
    """Bytes a parameter of weights, gradients and states, from the tensors that there are."""
    parameters = [own for group in optimizer.param_groups for own in group["params"]]
    kept = [*parameters, *(own.grad for own in parameters if own.grad is not None and not own.grad.is_sparse)]
    for state in optimizer.state.values():
        for value in (own for own in state.values() if isinstance(own, torch.Tensor) and own.numel() > 1):
            kept += [value._indices(), value._values()] if value.is_sparse else [value]
    return float(sum(value.nbytes for value in kept) / sum(value.numel() for value in parameters))


@dataclass
class Trained:
    """share, sizes: displacement against fp64's, and bytes a parameter, by the optimizer's name."""

    shares: dict[str, float]
    sizes: dict[str, float]
    judgement: Judgement


WATCHING: dict[str, Any] = {"every": 10, "windows": (16,), "budget": None, "casts": ()}


def train(case, model, optimizers):
    """Trains under the agent, with fp64 optimizers of the same rule fed the same gradients beside it."""
    handle = watch(model, optimizers, sample=case.sample, oracle=True, **WATCHING)
    parameters, tokens = list(model.parameters()), case.size[0]
    start = [own.detach().double().clone() for own in parameters]
    exact = [own.clone().requires_grad_() for own in start]
    twins = optimizers_of(case, exact)
    for group in (group for twin in twins for group in twin.param_groups if isinstance(group.get("eps"), tuple)):
        # torch's Adafactor takes what is None from the dtype of the weights.
        group["eps"] = tuple(torch.finfo(parameters[0].dtype).eps if own is None else own for own in group["eps"])
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        drawn = torch.randint(0, tokens, (64,), generator=generator)
        given = drawn
        if case.matrices:
            of_token = torch.randn(tokens, case.size[1], generator=torch.Generator().manual_seed(99))
            given = of_token[drawn].to(parameters[0])
        for own in parameters:
            own.grad = None
        nn.functional.cross_entropy(model(given).float(), drawn % 5).backward()
        for own, other in zip(parameters, exact, strict=True):
            other.grad = None if own.grad is None else own.grad.double()
        for optimizer in (*optimizers, *twins):
            optimizer.step()
    places = {id(own): place for place, own in enumerate(parameters)}
    found = Trained({}, {}, handle.judgement())
    for optimizer, named in zip(optimizers, optimizers_of(case, parameters), strict=True):
        own = [places[id(entry)] for group in optimizer.param_groups for entry in group["params"]]
        meant = torch.cat([(exact[place].detach() - start[place]).flatten() for place in own])
        stored = getattr(optimizer, "stored_parameter", torch.Tensor.double)
        moved = torch.cat([(stored(parameters[place]).detach() - start[place]).flatten() for place in own])
        name = type(named).__name__
        found.shares[name] = float(meant @ moved / (meant @ meant))
        found.sizes[name] = counted(optimizer)
    handle.remove()
    return found


def applied(case, choices):
    """The training as it begins when each optimizer's choice is made: weights first, then the optimizers."""
    model = model_of(case)
    optimizers = optimizers_of(case, list(model.parameters()))
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    for name, choice in sorted(choices.items(), key=lambda item: item[1].strategy is not None):
        names = {"model": model, "optimizer": optimizers[kinds.index(name)]}
        exec(choice.code, names)
        if choice.strategy is None:
            optimizers = optimizers_of(case, list(model.parameters()))
        else:
            optimizers[kinds.index(name)] = names["optimizer"]
    return model, optimizers


def hold_to_advice(case, before):
    """What was advised is done: the first choice of each optimizer, then the second, and so on."""
    advice = before.judgement.advice
    for place in range(max((len(entry.choices) for entry in advice), default=0)):
        choices = {entry.optimizer: entry.choices[min(place, len(entry.choices) - 1)] for entry in advice}
        after = train(case, *applied(case, choices))
        allowed = ("healthy", "unknown") if case.unknown else ("healthy",)
        assert after.judgement.health in allowed, after.judgement
        for name, choice in choices.items():
            assert after.shares[name] > min(before.shares[name], 1.0) - 1e-3, (name, choice)
            assert abs(after.shares[name] - 1) < 0.02, (name, choice, after)
            assert choice.bytes_per_parameter == pytest.approx(after.sizes[name], abs=0.1), (name, choice)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.drawn(by=lambda case: (case.told[0], case.unknown))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_advised_is_built_healthy_no_worse_and_as_large_as_told(case):
    model = model_of(case)
    before = train(case, model, optimizers_of(case, list(model.parameters())))
    [advice] = before.judgement.advice
    assert tuple(choice.strategy for choice in advice.choices) == case.told, before.judgement
    hold_to_advice(case, before)


@pytest.fixture
def one_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


SHARDED = Case("two optimizers", lambda p: SignedMomentum(p, lr=1e-4))
OTHERS = {
    "torch's": lambda p: T.AdamW(p, lr=1e-4),
    "plain": ours(CollageAdamW, "plain", lr=1e-4),
    "light": ours(CollageAdamW, "light", lr=1e-4),
    "master-weights": ours(CollageAdamW, "master-weights", lr=1e-4),
}


def stepped(model, optimizers):
    """What is said after the steps, and the bytes a parameter of each optimizer."""
    handle = watch(model, optimizers, sample="all", **WATCHING)
    for step in range(STEPS):
        drawn = torch.randint(0, 60, (64,), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        nn.functional.cross_entropy(model(drawn).float(), drawn % 5).backward()
        for optimizer in optimizers:
            optimizer.step()
    handle.remove()
    return handle.judgement(), [counted(optimizer) for optimizer in optimizers]


@pytest.mark.parametrize("other", [pytest.param(o, marks=[pytest.mark.nightly] * (o != "light")) for o in OTHERS])
def test_fp32_weights_of_a_sharded_model_are_those_of_each_of_its_optimizers(other, one_rank):
    """fully_shard wants one dtype: what one optimizer needs the other gets, and pays for."""
    case = replace(SHARDED, rows=OTHERS[other])
    model = model_of(case)
    fully_shard(model)
    optimizers = optimizers_of(case, list(model.parameters()))
    judgement, _ = stepped(model, optimizers)
    assert judgement.health == "losing updates"
    told = {entry.optimizer: entry.choices for entry in judgement.advice}
    assert set(told) == {type(optimizer).__name__ for optimizer in optimizers}
    [(choice,), (its_choice,)] = told.values()
    assert its_choice.code == choice.code
    assert ('build it with strategy="plain"' in judgement.advice[1].text) == (other in ("light", "master-weights"))
    names = {"model": model_of(case)}
    exec(choice.code, names)
    after, sizes = stepped(names["model"], optimizers_of(case, list(names["model"].parameters())))
    assert after.health == "healthy"
    assert [own.bytes_per_parameter for (own,) in told.values()] == pytest.approx(sizes, abs=0.1)


@pytest.mark.parametrize(
    ("make", "fitting"),
    [
        (partial(optimi.Lion, lr=1e-6, kahan_sum=False), "CollageLion"),
        (partial(optimi.Adam, lr=1e-5, kahan_sum=False), "CollageAdam"),
        (partial(optimi.AdamW, lr=1e-5, kahan_sum=False), "CollageAdamW"),
        (partial(bitsandbytes.optim.SGD, lr=1e-6, momentum=0.9), "CollageSGD"),
        (partial(pytorch_optimizer.Lion, lr=1e-6), "CollageLion"),
    ],
)
def test_a_rule_of_ours_is_recognised_by_whatever_names_its_options_have(make, fitting):
    """optimi's Lion was told that no strategy here is for Lion: its betas are two options."""
    model, optimizer, handle = watched(make)
    train_steps(model, optimizer, 3)
    assert handle.info.trained[0].fitting == fitting
