"""Integer remainders are found by what they do, decoded bit for bit, and lose nothing that they keep."""

from fractions import Fraction as Exact

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.intent.intent_choice import choose_intent
from collage_agent.sample.remainder_codes import SIGNED_BITS, RemainderCode, codes_of
from collage_agent.sample.stored_parts import Composition
from torch import nn

from tests.agent.intent import optimizers
from tests.agent.training import mlp, mlp_loss, train
from tests.keepers import replicas

pytestmark = pytest.mark.slow

BF16, FP16 = torch.bfloat16, torch.float16
FAITHFUL = {
    "16 bits appended, int16": (replicas.Appended, "low", BF16),
    "16 bits appended, uint16": (replicas.AppendedUnsigned, "mantissa", BF16),
    "signed remainder": (replicas.Rounded, "master_param", BF16),
    "fraction, int8": (replicas.Fraction, "error_bits", BF16),
    "fraction, int16": (replicas.Fraction16, "error_bits", BF16),
    "fp16, 13 bits appended": (replicas.Appended, "low", FP16),
    "fp16, signed remainder": (replicas.Rounded, "master_param", FP16),
    "fp16, fraction, int8": (replicas.Fraction, "error_bits", FP16),
    "fp16, fraction, int16": (replicas.Fraction16, "error_bits", FP16),
}


def fingerprint(handle):
    return handle.info.fingerprint


def unexplained(optimizer):
    return choose_intent(optimizer)[0].unexplained


@pytest.mark.drawn(by=lambda name: (FAITHFUL[name][2], "appended" in name, "int8" in name))
@pytest.mark.parametrize("name", FAITHFUL)
def test_a_faithful_keeping_loses_nothing(name):
    kind, key, dtype = FAITHFUL[name]
    coarse = kind is replicas.Fraction
    model = mlp(dtype=dtype)
    optimizer = kind(model.parameters(), lr=1e-4 if coarse else 1e-5)
    handle = watch(model, optimizer, every=2, sample="all", oracle=True, windows=(4,))
    train(model, optimizer, 16)
    values, seen = handle.summary(), fingerprint(handle)
    assert handle.info.observed_strategy == "integer-remainder"
    assert (seen.residual, seen.master, seen.unexplained) == (key, None, None)
    assert values["model"]["lost_update_ratio"] < (0.02 if coarse else 0.002)
    for name in ("edq_ratio", "edq_oracle_ratio", "edq_window_ratio/4"):
        assert values["model"][name] == pytest.approx(1.0, abs=1e-3), name
    for layer in values["layers"].values():
        assert layer["edq_ratio"] == pytest.approx(1.0, abs=0.01)


class Shortened:
    """Each tensor's gradient is shortened by a number that depends on all of it."""

    def move(self, parameter, gradient, group):
        super().move(parameter, gradient / (1 + gradient.double().norm()).to(gradient.dtype), group)  # type: ignore[misc]


@pytest.mark.drawn(by=lambda name: (FAITHFUL[name][2], "int8" in name))
@pytest.mark.parametrize("name", FAITHFUL)
def test_whole_tensors_in_rotation_are_decoded_too(name):
    kind, _, dtype = FAITHFUL[name]
    model = mlp(dtype=dtype)
    optimizer = type("WholeTensors", (Shortened, kind), {})(model.parameters(), lr=1e-4)
    handle = watch(model, optimizer, every=1, sample="all")
    train(model, optimizer, 4)
    assert handle.info.intent == "whole-tensor"
    # An update this small is coarse against an eighth of an ulp in 8 bits.
    assert handle.summary()["model"]["edq_ratio"] == pytest.approx(1.0, abs=5e-3)


def test_the_stored_weight_is_what_the_formula_says():
    """facts: TransformerEngine's high half is p − 1 where the remainder is negative; the low half its 16 bits."""
    weight = (torch.randn(4096) * torch.logspace(-6, 3, 4096)).bfloat16()
    low = torch.randint(-(2**15), 2**15, (4096,), generator=torch.Generator().manual_seed(1)).to(torch.int16)
    high = weight.view(torch.int16).int() - (low < 0).int()
    expected = ((high << 16) | (low.int() & 0xFFFF)).view(torch.float32)
    assert torch.equal(weight.double() + SIGNED_BITS.residual(weight, low), expected.double())
    appended = next(code for code in codes_of(torch.uint16, BF16) if code.unsigned)
    bits = ((weight.view(torch.int16).int() << 16) | (low.int() & 0xFFFF)).view(torch.float32)
    for kept in (low, low.view(torch.uint16)):
        assert torch.equal(weight.double() + appended.residual(weight, kept), bits.double())


WEIGHTS = [0.0, -0.0, 1.0, -1.0, 1.0078125, -0.498046875, 2.0**-14, -(2.0**-15), 3.0 * 2.0**-24, 96.0]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("integers", [torch.int8, torch.uint8, torch.int16, torch.uint16])
def test_every_form_is_exact(dtype, integers):
    """Against rational arithmetic, at powers of two, zeros of both signs and subnormals."""
    information = torch.iinfo(integers)
    edges = [information.min, information.max, 0, 1, information.max // 2, information.max // 2 + 1, 77]
    weight = torch.tensor([w for w in WEIGHTS for _ in edges], dtype=torch.float64).to(dtype)
    kept = torch.tensor(edges * len(WEIGHTS)).to(integers)
    for code in codes_of(integers, dtype):
        found = code.residual(weight, kept)
        for p, k, r in zip(weight, kept.tolist(), found.tolist(), strict=True):
            expected = exact_residual(code, p, k, 8 * integers.itemsize)
            if code.units % 2 == 0 and code.units & (code.units - 1) == 0:
                assert Exact(r) == expected, (code.words, float(p), k)
            else:
                assert r == pytest.approx(float(expected), rel=1e-15), (code.words, float(p), k)


def exact_residual(code: RemainderCode, weight, integer: int, bits: int) -> Exact:
    modulus = integer % 2**bits
    count = modulus if code.unsigned or modulus < 2 ** (bits - 1) else modulus - 2**bits
    if code.outwards and bool(weight.signbit()):
        count = -count
    inwards = code.outwards and count * float(weight) < 0
    target = torch.zeros_like(weight) if inwards else torch.copysign(torch.tensor(torch.inf), weight.float())
    neighbour = torch.nextafter(weight, target.to(weight.dtype))
    gap = abs(Exact(float(neighbour)) - Exact(float(weight)))
    return Exact(count) * gap / code.units


def test_a_remainder_that_was_cast_is_said_and_read_as_what_is_left():
    """torch's load_state_dict casts every state to the weight's dtype: of 16 bits 8 are left."""
    model = mlp()
    optimizer = replicas.Rounded(model.parameters(), lr=1e-5)
    handle = watch(model, optimizer, every=1, sample="all")
    train(model, optimizer, 3)
    assert fingerprint(handle).findings == []
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(state["master_param"].dtype == BF16 for state in optimizer.state.values())
    (told,) = fingerprint(handle).findings
    assert "the integer remainder master_param has become bfloat16" in told
    assert handle.info.observed_strategy == "integer-remainder"
    named = {name: (p, optimizer.state[p]) for name, p in model.named_parameters()}
    before = {name: optimizer.decode(p.detach(), state["master_param"], 1) for name, (p, state) in named.items()}
    train(model, optimizer, 1, start=3)
    layers = handle.summary()["layers"]
    for name, (p, state) in named.items():
        moved = optimizer.decode(p.detach(), state["master_param"], 1).double() - before[name].double()
        assert layers[name]["effective_norm"] == pytest.approx(float(moved.norm()), rel=1e-9), name


def train_decoupled(model, optimizer, steps):
    """As Megatron's precision-aware optimizer is fed: gradients in fp32 beside the weights, none in `grad`."""
    for step in range(steps):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        for parameter in model.parameters():
            parameter.decoupled_grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "within"),
    [({"sample": "all", "oracle": True, "windows": (4,)}, 1e-12), ({"sample": 64, "budget": None}, 1e-3)],
    ids=["whole tensors", "samples, which some measured steps hold against whole gradients"],
)
def test_the_decoupled_gradient_is_read_where_the_optimizer_steps_it(options, within):
    model, plain = mlp(), mlp()
    optimizer = replicas.PrecisionAware(model.parameters(), lr=1e-5)
    coupled = replicas.Rounded(plain.parameters(), lr=1e-5)
    handle = watch(model, optimizer, every=1, **options)
    expected = watch(plain, coupled, every=1, **options)
    train_decoupled(model, optimizer, 16)
    train(plain, coupled, 16)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    found, wanted = handle.summary(), expected.summary()
    assert found["step"] == wanted["step"] == 16
    told = ["edq_ratio", "grad_norm", "lost_update_ratio"]
    if "oracle" in options:
        told += ["edq_oracle_ratio", "edq_window_ratio/4"]
        assert found["model"]["edq_ratio"] == pytest.approx(1.0, abs=1e-4)
    for key in told:
        assert found["model"][key] == pytest.approx(wanted["model"][key], rel=within), key
    assert fingerprint(handle).gradients == {"float32": sum(p.numel() for p in model.parameters())}


def test_a_decoupled_gradient_that_nobody_steps_is_not_read():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = watch(model, optimizer, every=1, sample="all")
    mlp_loss(model, 0).backward()
    for parameter in model.parameters():
        parameter.decoupled_grad = torch.ones_like(parameter)
    assert handle.summary()["step"] is None
    optimizer.step()
    expected = float(sum(p.grad.double().square().sum() for p in model.parameters())) ** 0.5
    assert handle.summary()["model"]["grad_norm"] == pytest.approx(expected)


def test_a_keeping_that_is_not_understood_is_named():
    model = mlp()
    optimizer = replicas.Scrambled(model.parameters(), lr=1e-5)
    handle = watch(model, optimizer, every=1, sample="all")
    train(model, optimizer, 3)
    told = fingerprint(handle).unexplained
    assert "opaque (int32)" in told
    assert "exp_avg" not in told


def test_a_keeping_on_the_parameter_itself_is_noticed():
    class Hidden(replicas.Replica):
        """The master weight is an attribute of the parameter, which no state names."""

        def load(self, parameter, state):
            known = getattr(parameter, "master", None)
            return parameter.float() if known is None else known

        def store(self, parameter, state, weight, *, frozen):
            parameter.master = weight
            parameter.copy_(weight)

    assert "no state of their shape says why" in unexplained(Hidden([nn.Parameter(torch.ones(4, 4, dtype=BF16))]))


def test_integers_beside_weights_that_no_clone_can_step_are_named():
    class OnDevice(replicas.Fraction):
        """Refuses tensors that are not on a device of its own, as kernels do."""

        def move(self, parameter, gradient, group):
            if not hasattr(parameter, "belongs"):
                raise RuntimeError("tensors must be on the device")
            super().move(parameter, gradient, group)

    model = mlp()
    for parameter in model.parameters():
        parameter.belongs = True
    optimizer = OnDevice(model.parameters())
    handle = watch(model, optimizer, every=1)
    train(model, optimizer, 2)
    assert handle.info.intent == "before-after"
    assert "error_bits (int8) may complete the weights" in fingerprint(handle).unexplained


def test_counters_and_codes_are_no_remainders():
    class Counting(optimizers.Momentum):
        """An integer for each element that changes at each step and has nothing to do with the weight's bits."""

        def begin(self, parameter, state):
            state["seen"] = torch.zeros_like(parameter, dtype=torch.int16)

        def move(self, parameter, state, update):
            state["seen"].add_(1)
            super().move(parameter, state, update)

    (intent,) = choose_intent(Counting([nn.Parameter(torch.ones(4, 4, dtype=BF16))]))
    assert (intent.composition, intent.unexplained) == (Composition(), None)


@pytest.mark.parametrize("kind", [replicas.Rounded, replicas.Kahan, replicas.Master])
def test_a_group_of_more_wide_than_narrow_tensors_is_watched_by_the_narrow(kind):
    """Norms in fp32 outnumber matrices in bf16 in many models; which of them is probed must not be by count."""
    parameters = [nn.Parameter(torch.ones(8, dtype=torch.float32)) for _ in range(3)]
    (intent,) = choose_intent(kind([*parameters, nn.Parameter(torch.ones(4, 4, dtype=BF16))]))
    assert not intent.composition.is_plain
