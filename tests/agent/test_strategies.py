"""Our own optimizers under the agent: the stored weight is what counts, and the ratios tell strategies apart."""

from functools import partial

import pytest
from collage_optim import CollageAdamW

from tests.agent.step.test_measurer import totals_of
from tests.agent.training import backward, gpt_loss, mlp, small_gpt, train, watched

BYTES = {"plain": 8, "light": 10, "plus": 12, "master-weights": 16}


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("arithmetic", ["fp32", "storage"])
@pytest.mark.parametrize("strategy", BYTES)
def test_edq_and_decrements_tell_the_strategies_apart(strategy, arithmetic):
    make = partial(CollageAdamW, lr=2e-4, weight_decay=0.1, strategy=strategy, arithmetic=arithmetic)
    _, _, handle = watched(make, small_gpt(layers=1), every=10, oracle=True, steps=30, loss_of=gpt_loss)
    values, info = handle.summary()["model"], handle.info
    assert info.intent == "rule"
    assert info.observed_strategy == strategy
    if strategy == "plain":
        assert values["edq_ratio"] < 0.95
        assert values["lost_update_ratio"] > 0.2
    else:
        assert values["edq_ratio"] == pytest.approx(1.0, abs=0.02)
    if strategy in ("plus", "master-weights"):
        assert values["state_decrement_ratio/exp_avg_sq"] == pytest.approx(1.0, abs=0.02)
    else:
        assert values["state_decrement_ratio/exp_avg_sq"] < 0.2
    assert values["edq_visible_ratio"] != values["edq_ratio"] or strategy == "plain"
    assert handle._last.scalars["bytes_per_parameter"] == pytest.approx(BYTES[strategy])


@pytest.mark.parametrize("strategy", [*BYTES, "kahan"])
def test_stored_sums_equal_a_look_at_the_whole_stored_weight(strategy):
    make = partial(CollageAdamW, lr=1e-3, weight_decay=0.1, strategy=strategy)
    model, optimizer, handle = watched(make, sample="all", steps=3)
    backward(model, 3)
    (group,), named = optimizer.param_groups, dict(model.named_parameters())
    before = {name: optimizer.stored_parameter(p) for name, p in named.items()}
    visible = {name: p.detach().double().clone() for name, p in named.items()}
    intended = {}
    for name, p in named.items():
        state = optimizer.state[p]
        kept = {key: state[key].double() + state.get(f"{key}_low", 0.0) for key in ("exp_avg", "exp_avg_sq")}
        intended[name] = optimizer.exact_displacement(group, kept, before[name], p.grad.double(), 4)[0]
    optimizer.step()
    for layer, totals in totals_of(handle).items():
        p = named[layer]
        u = intended[layer].flatten()
        e = (optimizer.stored_parameter(p) - before[layer]).flatten()
        ev = (p.detach().double() - visible[layer]).flatten()
        expected = {
            "intended_squared_sum": u @ u,
            "intended_effective_sum": u @ e,
            "effective_squared_sum": e @ e,
            "intended_visible_sum": u @ ev,
            "visible_squared_sum": ev @ ev,
            "lost": ((u != 0) & (e == 0)).sum(),
            "lost_visible": ((u != 0) & (ev == 0)).sum(),
            "unchanged": (ev == 0).sum(),
        }
        for key, value in expected.items():
            assert totals[key] == pytest.approx(float(value), rel=1e-9, abs=1e-30), (key, layer)


def test_groups_with_different_strategies_are_measured_apart():
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "strategy": "plus"}, {"params": others, "strategy": "plain"}]
    _, optimizer, handle = watched(lambda _: CollageAdamW(groups, lr=2e-4), model, sample="all")
    train(model, optimizer, 5)
    layers = handle.summary()["layers"]
    assert layers["2.weight"]["edq_ratio"] == pytest.approx(1.0, abs=0.02)
    assert layers["2.weight"]["edq_visible_ratio"] != layers["2.weight"]["edq_ratio"]
    assert layers["2.bias"]["edq_visible_ratio"] == layers["2.bias"]["edq_ratio"] < 0.95
    assert handle.info.observed_strategy == "unknown"


def test_what_kahan_loses_is_the_same_however_it_is_measured():
    """The compensation holds far smaller numbers than fp32 tells apart beside the weight."""
    lost = []
    for sample in (1 << 20, "all"):
        _, _, handle = watched(partial(CollageAdamW, lr=1e-7, strategy="kahan"), sample=sample, steps=5)
        lost.append(handle.summary()["model"]["lost_update_ratio"])
    assert lost[0] == lost[1] < 0.01
