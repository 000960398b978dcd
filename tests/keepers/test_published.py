"""Steps as published code takes them: 16 bits only, equal shapes at once, nested states; u is known and right."""

import copy

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.intent.weight_bits import UnsignedBits
from torch import nn

from tests.keepers.published import MantissaAdamW, NestedAdamW, StackedMuon

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16


def model_of(seed, width=24, dtype=BF16):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 5))
    return model.to(dtype)


def train(model, optimizer, steps=40, seed=100):
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed + step)
        inputs = torch.randn(16, 30, generator=generator).to(next(model.parameters()).dtype)
        (model(inputs).float() - 1.0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def judged(model, optimizer, steps=40, **options):
    handle = watch(model, optimizer, every=1, sample="all", budget=None, **options)
    train(model, optimizer, steps)
    return handle


@pytest.mark.drawn(by=lambda keep, **_: (keep,))
@pytest.mark.parametrize(
    ("seed", "width", "rate", "decay"), [(0, 24, 1e-5, 0.0), (1, 33, 1e-6, 0.1), (2, 48, 1e-4, 0.1)]
)
@pytest.mark.parametrize("keep", [True, False])
def test_sixteen_mantissa_bits_are_understood(keep, seed, width, rate, decay):
    model = model_of(seed, width)
    with UnsignedBits():  # The published code is compiled; as it is written, torch has no kernels for it here.
        handle = judged(model, MantissaAdamW(model.parameters(), lr=rate, decay=decay, keep=keep))
    found = handle.judgement()
    assert handle.info.intent == "shadow"
    assert found.health == ("healthy" if keep else "losing updates"), found.text
    assert (handle.info.fingerprint.residual == "mantissa") is keep


class Noisy(torch.optim.Optimizer):
    """Rounds at random by the bits, for bf16 weights alone; `spoilt`: a plain copy overwrites it."""

    def __init__(self, params, lr, spoilt):
        super().__init__(params, {"lr": lr})
        self.spoilt = spoilt

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["v"] = torch.zeros_like(p, dtype=torch.float32)
            state["v"].mul_(0.99).addcmul_(p.grad.float(), p.grad.float(), value=0.01)
            new = p.float() - self.param_groups[0]["lr"] * p.grad.float() / (state["v"].sqrt() + 1e-8)
            noise = torch.randint_like(new, 0, 1 << 16, dtype=torch.int32)
            noise.add_(new.view(dtype=torch.int32)).bitwise_and_(-65536)
            p.copy_(noise.view(dtype=torch.float32))
            if self.spoilt:
                p.copy_(new)


@pytest.mark.drawn(by=lambda spoilt, **_: (spoilt,))
@pytest.mark.parametrize(("seed", "rate"), [(0, 1e-5), (1, 1e-6), (2, 3e-5)])
@pytest.mark.parametrize("spoilt", [True, False])
def test_noise_in_the_bits_is_rounding_at_random(spoilt, seed, rate):
    model = model_of(seed, 128)
    handle = judged(model, Noisy(model.parameters(), rate, spoilt), strategy="stochastic", windows=(8,))
    assert handle.info.fingerprint.stochastic_rounding is not spoilt
    assert handle.judgement().health == ("losing updates" if spoilt else "healthy"), handle.judgement().text


class Stack(nn.Module):
    def __init__(self, rows, tall, dtype):
        super().__init__()
        self.embed = nn.Embedding(40, 16).to(BF16)
        self.square = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(rows)).to(dtype)
        self.tall = nn.ModuleList(nn.Linear(16, tall, bias=False) for _ in range(rows)).to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens).to(self.square[0].weight.dtype)
        for square, tall in zip(self.square, self.tall, strict=True):
            x = x + tall(square(x)).relu()[..., :16]
        return x


def stacked(seed, rows, tall, rate, dtype=torch.float32):
    torch.manual_seed(seed)
    model = Stack(rows, tall, dtype)
    groups = [
        {"params": list(model.embed.parameters()), "kind": "adamw", "lr": rate, "decay": 0.01},
        {"params": list(model.square.parameters()), "lr": rate / 10, "decay": 0.1},
        {"params": list(model.tall.parameters()), "lr": rate / 10, "decay": 0.1},
    ]
    return model, StackedMuon(groups)


def exact_displacements(model, optimizer):
    """u of the step that is about to be taken, by another optimizer of fp64 tensors."""
    twin = copy.deepcopy(model).double()
    own = dict(zip(model.parameters(), twin.parameters(), strict=True))
    groups = [{**group, "params": [own[p] for p in group["params"]]} for group in optimizer.param_groups]
    exact = StackedMuon(groups)
    exact._rate, exact._momentum = exact._rate.double(), exact._momentum.double()
    for p, state in optimizer.state.items():
        exact.state[own[p]] = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    for p, q in own.items():
        q.grad = p.grad.double()
    before = {q: q.detach().clone() for q in own.values()}
    with torch.no_grad():
        for group in exact.param_groups:
            _float_is_double(exact, group)
    names = {q: name for name, q in twin.named_parameters()}
    return {names[q]: (q.detach() - start) for q, start in before.items()}


def _float_is_double(exact, group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        (exact.orthogonal if group["kind"] == "muon" else exact.elementwise)(group)


@pytest.mark.parametrize(
    ("seed", "rows", "tall", "rate"),
    [
        (1, 2, 20, 1e-3),
        *(pytest.param(*own, marks=pytest.mark.nightly) for own in ((0, 3, 48, 0.02), (2, 1, 16, 5e-3))),
    ],
)
def test_equal_shapes_at_once_have_an_exact_u(seed, rows, tall, rate):
    model, optimizer = stacked(seed, rows, tall, rate)
    handle = watch(model, optimizer, every=1, sample="all", budget=None)
    for step in range(6):
        tokens = torch.randint(0, 40, (8, 12), generator=torch.Generator().manual_seed(step))
        (model(tokens).float() - 1.0).square().mean().backward()
        expected = exact_displacements(model, optimizer)
        before = {name: p.detach().double() for name, p in model.named_parameters()}
        optimizer.step()
        layers = handle.summary()["layers"]
        assert layers.keys() == expected.keys()
        for name, u in expected.items():
            e = model.get_parameter(name).detach().double() - before[name]
            assert layers[name]["intended_norm"] == pytest.approx(float(u.norm()), rel=1e-9)
            assert layers[name]["edq_ratio"] == pytest.approx(float((u * e).sum() / u.square().sum()), rel=1e-9)
        optimizer.zero_grad()


@pytest.mark.drawn(by=lambda dtype, **_: (dtype,))
@pytest.mark.parametrize(("rows", "tall", "seed"), [(2, 48, 0), (3, 20, 1)])
@pytest.mark.parametrize(
    ("dtype", "rate", "health"),
    [
        (BF16, 1e-5, "losing updates"),
        pytest.param(torch.float32, 1e-3, "healthy", marks=pytest.mark.nightly),
    ],
)
def test_equal_shapes_at_once_are_judged(dtype, rate, health, rows, tall, seed):
    model, optimizer = stacked(seed, rows, tall, rate, dtype)
    handle = watch(model, optimizer, every=1, sample="all", budget=None, layers=r"square|tall")
    for step in range(12):
        tokens = torch.randint(0, 40, (8, 12), generator=torch.Generator().manual_seed(step))
        (model(tokens).float() - 1.0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.judgement().health == health, handle.judgement().text


@pytest.mark.drawn
@pytest.mark.parametrize(("seed", "rate"), [(0, 1e-3), (1, 3e-3)])
@pytest.mark.parametrize(("second", "health"), [(0.95, "healthy"), (0.999, "states are stuck")])
def test_nested_moments_are_read(second, health, seed, rate):
    model = model_of(seed, dtype=torch.float32)
    optimizer = NestedAdamW(model.parameters(), lr=rate, betas=(0.9, second), storage=BF16)
    train(model, optimizer, 2)
    optimizer.state[optimizer.param_groups[0]["params"][0]][0]["step"].fill_(10**6)
    handle = judged(model, optimizer)
    assert set(handle.info.fingerprint.states) == {"0.exp_avg_0", "0.exp_avg_sq_0"}
    assert handle.judgement().health == health, handle.judgement().text
    assert handle.summary()["model"]["edq_ratio"] == pytest.approx(1.0, abs=1e-4)


def test_the_one_counter_of_nested_states_is_every_tensors():
    """The first steps are corrected for by the count: a tensor that had none would be stepped as at step 1."""
    model = model_of(3, dtype=torch.float32)
    handle = judged(model, NestedAdamW(model.parameters(), betas=(0.9, 0.999)), 3)
    for name, layer in handle.summary()["layers"].items():
        assert layer["edq_ratio"] == pytest.approx(1.0, abs=1e-4), name
