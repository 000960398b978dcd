"""What a training is expected to keep: said right it is silent, said wrong it is known at the first step."""

import logging
from functools import partial

import pytest
import torch
from collage_agent import ExpectationBroken
from collage_agent.expectations import BREACH_EXIT_STATUS, Expectations
from collage_agent.run_settings import watch_defaults
from collage_optim import CollageAdamW
from torch import nn

from collage_monitor.strategies import STRATEGIES
from tests.agent.intent.optimizers import ByParameter
from tests.agent.training import mean_square, train, watched
from tests.agent.watching.test_resume_check import Saved
from tests.keepers.ways import BF16, FP32, ways

WHOLE = ("master-weights", "integer-remainder", "coupled-9")
IN_24_BITS = ("split-24bit-8bit", "coupled-8", "coupled-7")
KEPT = [(way, dtype) for way in ways() if way.seen != "unknown" for dtype in way.dtypes]
PRECISION = {BF16: 8, torch.float16: 11, FP32: 24, torch.float64: 53}


def kept_bits(way, dtype):
    """Bits of the significand of the weights, of all that is kept of them: where 16 or more stand beside one of 16,
    every bit of an fp32 weight."""
    in_16 = (way.seen in WHOLE or way.seen.startswith("split-master")) and "24 bits" not in way.who
    if (way.weights or dtype) == FP32 or in_16:
        return 24
    beside = 8 if way.seen in IN_24_BITS or way.name == "Fraction" else 0
    return PRECISION[way.weights or dtype] + beside


def narrowest_average(way, optimizer):
    """Bits of the significand of the narrowest average in the states: with those of an integer that lengthens it,
    not with a compensation; codes have none."""
    found = []
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            beside = key in (way.completes, "master_parameter", "main", "z") or key.endswith(("_low", "_scale"))
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and not beside:
                low = state.get(f"{key}_low")
                bits = 0 if low is None or low.is_floating_point() else 8 * low.element_size()
                found.append(PRECISION.get(value.dtype, 0) + bits if type(value) is torch.Tensor else 0)
    return min(found)


@pytest.mark.slow
@pytest.mark.drawn(by=lambda way, dtype, taken: (way.seen, dtype, taken))
@pytest.mark.parametrize("taken", [0, 3], ids=["fresh", "resumed"])
@pytest.mark.parametrize(("way", "dtype"), KEPT, ids=[f"{way.who}, {way.name}, {dtype}" for way, dtype in KEPT])
def test_each_expectation_of_each_way_is_judged_right_at_the_first_step(way, dtype, taken):
    training = Saved(way, dtype, taken)
    info = training.watched().info
    seen = info.fingerprint.states.get(way.completes, "")
    assert way.seen not in IN_24_BITS or seen == "int8: the signed remainder of rounding to nearest, 8 bits"
    held = {strategy: strategy == way.seen for strategy in STRATEGIES}
    weights, states = kept_bits(way, dtype), narrowest_average(way, training.optimizer)
    for name, bits in PRECISION.items():
        held[f"weights={str(name)[6:]}"] = bits <= weights
        held[f"states={str(name)[6:]}"] = bits <= states
    expected = {text: Expectations.of(text) for text in held}
    assert {text: own is not None and not [*own.broken_by(info)] for text, own in expected.items()} == held


@pytest.mark.parametrize("strategy", ["plain", "fp32-states", "plus", "split-master-8bit", "master-weights"])
def test_states_are_held_to_what_they_should_be(strategy):
    wide = strategy in ("fp32-states", "master-weights")
    for states, name in (("float32", "states."), ({"exp_avg_sq": "float32"}, "states.exp_avg_sq")):
        handle = trained(partial(split, strategy=strategy), 1, expect={"states": states})
        assert [breach.expectation for breach in handle.info.broken] == ([] if wide else [name])
    unknown = trained(partial(split, strategy=strategy), 1, expect={"states": {"momentum_buffer": "float32"}})
    assert unknown.info.broken == []


def trained(make, count=2, **options):
    """A watch whose training took steps of a bf16 model."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(BF16)
    return watched(make, layers, count, lambda own, _: mean_square(own, torch.randn(16, 64)), **options)[2]


plain = partial(torch.optim.AdamW, lr=1e-5)
split = partial(CollageAdamW, lr=1e-5, betas=(0.9, 0.95), strategy="split-master")


def test_what_arrives_is_held_to_its_bounds():
    broken = trained(plain, expect={"min_edq": 0.95, "max_lost": 0.05}).info.broken
    assert [(breach.expectation, breach.step) for breach in broken] == [("min_edq", 1), ("max_lost", 1)]
    assert "edq_ratio of at least 0.95" in broken[0].text
    assert trained(split, 8, expect={"min_edq": 0.95}).info.broken == []


@pytest.mark.slow
def test_what_is_lost_is_not_asked_of_single_steps_that_round_at_random(caplog):
    with caplog.at_level(logging.WARNING, "collage_agent"):
        assert trained(split, 3, expect={"max_lost": 0.05}).info.broken == []
    assert caplog.text.count("max_lost is not looked at") == 1
    lossy = partial(CollageAdamW, lr=1e-9, strategy="stochastic")
    (breach,) = trained(lossy, 40, expect={"max_lost": 1e-4}, windows=(8,)).info.broken
    assert breach.expectation == "max_lost"
    assert "lost_window_ratio/8" in breach.text


def test_a_breach_is_said_once_and_counted(caplog):
    with caplog.at_level(logging.ERROR, "collage_agent"):
        handle = trained(plain, 4, expect="master-weights")
    assert caplog.text.count("expectation broken: expected strategy master-weights, seen is plain") == 1
    assert "expectation broken: expected strategy master-weights" in str(handle)
    assert handle.info.expected == "strategy=master-weights"


def test_a_training_ends_where_that_was_asked_for():
    with pytest.raises(ExpectationBroken, match="expected weights in float32, kept are bfloat16"):
        trained(plain, expect={"weights": "float32"}, on_breach="raise")
    with pytest.raises(SystemExit) as ended:
        trained(plain, expect={"weights": "float32"}, on_breach="exit")
    assert ended.value.code == BREACH_EXIT_STATUS
    assert trained(split, expect={"weights": "float32"}, on_breach="exit").info.broken == []


class WideMomentum(ByParameter):
    """Keeps its average in fp32, until torch's own loading casts it to the weight's dtype."""

    def step_one(self, parameter, group):
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter, dtype=FP32))
        average.mul_(0.9).add_(parameter.grad, alpha=0.1)
        parameter.add_(average, alpha=-1e-3)


def test_states_that_are_cast_by_loading_them_in_the_middle_are_seen():
    model, optimizer, handle = watched(WideMomentum, every=100, first_step=1, expect={"states": "float32"}, steps=2)
    assert handle.info.broken == []
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1, start=2)
    (breach,) = handle.info.broken
    assert str(breach) == "expected states in float32, kept are average in bfloat16, at step 3"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("masters", "'masters'"),
        ("weights=int8", "'int8'"),
        ({"min_edq": 2}, "min_edq=2"),
        ({"min_edq": True}, "min_edq=True"),
        ({"averages": "float32"}, "'averages'"),
        ({}, "expects nothing"),
        (3, "expect=3"),
    ],
)
def test_what_cannot_be_expected_is_refused(given, told):
    with pytest.raises((ValueError, TypeError), match="expect") as refused:
        Expectations.of(given)
    assert told in str(refused.value)


def test_text_and_mapping_say_the_same():
    text = "strategy=plus,weights=float32,states=bfloat16,states.exp_avg_sq=float32,min_edq=0.95,max_lost=0.05"
    states = {"": "bfloat16", "exp_avg_sq": "float32"}
    options = {"strategy": "plus", "weights": "float32", "states": states, "min_edq": 0.95, "max_lost": 0.05}
    expected = Expectations("plus", "float32", states, 0.95, 0.05)
    assert Expectations.of(text) == Expectations.of(options) == expected
    assert str(expected) == text


def test_the_environment_states_expectations(caplog):
    given = watch_defaults({"COLLAGE_EXPECT": "weights=float32", "COLLAGE_ON_BREACH": "exit"})
    assert given == {"expect": Expectations(weights="float32"), "on_breach": "exit"}
    with caplog.at_level(logging.WARNING, "collage_agent"):
        assert watch_defaults({"COLLAGE_EXPECT": "weights=int8", "COLLAGE_ON_BREACH": "stop"}) == {}
    assert "COLLAGE_EXPECT ignored" in caplog.text
    assert "COLLAGE_ON_BREACH ignored" in caplog.text
