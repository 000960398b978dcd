"""Measured steps against brute force: whole tensors re-run in fp64, added up in exact fractions; decay, residuals
and zero states against the live optimizer's own tensors."""

from functools import partial

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.sample.sampling import MAXIMUM_BLOCK, draw
from collage_agent.step import bucket_planner, observed_step
from collage_agent.step.layout import differing_counters, out_of_lock_step
from collage_optim import CollageAdamW

from collage_monitor.metrics import HISTOGRAM_LABELS
from collage_monitor.statistics import histogram_counts
from tests.agent.training import adamw, backward, gpt_loss, mean_square, mlp, mlp_loss, small_gpt, train, watched
from tests.reference import diagnostics
from tests.reference.expansions import LAYOUTS
from tests.reference.intended import full_precision_update

OPTIMIZERS = {
    "AdamW lr tensor": partial(adamw, lr=torch.tensor(1e-3), foreach=False),
    "AdamW maximize": partial(adamw, maximize=True),
    "AdamW fused": partial(adamw, weight_decay=0.1, fused=True),
    "SGD nesterov": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
}
"""u itself, of every optimizer: tests/agent/intent/test_matrix.py."""


def step_with_reference(model, optimizer, step):
    """One training step; θ, g, u, e of every tensor as flat fp64 tensors, by name."""
    optimizer.zero_grad()
    mlp_loss(model, step).backward()
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {name: p for name, p in model.named_parameters() if p.grad is not None and id(p) in stepped}
    updates = full_precision_update(optimizer)
    found = {
        name: [values.detach().double().flatten().clone() for values in (p, p.grad, updates[id(p)], p)]
        for name, p in named.items()
    }
    optimizer.step()
    for name, p in named.items():
        found[name][3].sub_(p.detach().double().flatten()).neg_()
    return found


def totals_of(handle):
    measurement = handle._last
    table = measurement.table()
    return {
        layer.name: {key: row[column] for key, row in table.items()}
        for column, layer in enumerate(measurement.layout.layers)
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sums_of_whole_tensors_equal_a_full_fp64_run(name):
    model, optimizer, handle = watched(OPTIMIZERS[name], sample="all")
    for step in range(4):
        expected = step_with_reference(model, optimizer, step)
    assert handle.step == 4
    assert handle.info.intent == "shadow"
    for layer, totals in totals_of(handle).items():
        theta, gradient, u, e = expected[layer]
        assert totals["intended_squared_sum"] == pytest.approx(float(u @ u), rel=1e-9)
        assert totals["intended_effective_sum"] == pytest.approx(float(u @ e), rel=1e-9)
        assert totals["effective_squared_sum"] == pytest.approx(float(e @ e), rel=1e-12)
        assert totals["gradient_squared_sum"] == pytest.approx(float(gradient @ gradient), rel=1e-12)
        assert totals["parameter_squared_sum"] == pytest.approx(float(theta @ theta), rel=1e-12)
        assert totals["sampled"] == totals["elements"] == theta.numel()


@pytest.mark.slow
def test_classes_and_histogram_of_whole_tensors_equal_the_exact_counts():
    model, optimizer, handle = watched(partial(adamw, lr=3e-4), sample="all")
    for step in range(3):
        expected = step_with_reference(model, optimizer, step)
    for layer, totals in totals_of(handle).items():
        theta, gradient, u, e = expected[layer]
        exact = [diagnostics.exact(x) for x in (theta, gradient, u, e, e)]
        counts = diagnostics.classes(*exact)
        assert {key: totals[key] for key in counts} == counts
        octaves = diagnostics.octave_counts(exact[2], theta.tolist(), torch.bfloat16)
        assert histogram_counts(totals).tolist() == octaves
        five = sum(totals[key] for key in ("nonfinite", "idle", "lost", "distorted", "faithful"))
        assert five == totals["elements"]


@pytest.mark.slow
def test_sampled_totals_estimate_the_whole_without_bias_and_intervals_cover_it():
    """Mean over many draws of the sampled total of Σ u·e and of the lost elements: within 4 standard errors."""
    model, optimizer, reference = watched(partial(adamw, lr=3e-4), mlp(width=130), every=4, sample="all")
    handles = [watch(model, optimizer, every=4, sample=1024, seed=seed, budget=None) for seed in range(40)]
    train(model, optimizer, 4)
    whole = totals_of(reference)["2.weight"]
    sampled = [totals_of(handle)["2.weight"] for handle in handles]
    assert sampled[0]["sampled"] < sampled[0]["elements"] == whole["elements"]
    for key in ("intended_effective_sum", "intended_squared_sum", "lost", "gradient_squared_sum"):
        values = torch.tensor([float(totals[key]) for totals in sampled], dtype=torch.float64)
        standard_error = float(values.std()) / len(values) ** 0.5
        assert abs(float(values.mean()) - whole[key]) < 4 * standard_error
    truth = reference.summary()["layers"]["2.weight"]
    found = [handle.summary()["layers"]["2.weight"] for handle in handles]
    for key in ("edq_ratio", "lost_update_ratio"):
        assert truth[f"{key}_low"] == truth[key] == truth[f"{key}_high"]
        assert sum(own[f"{key}_low"] <= truth[key] <= own[f"{key}_high"] for own in found) >= 34


def test_a_parameter_without_gradient_is_not_reported_and_one_that_joins_later_is():
    model, optimizer, handle = watched(sample="all")
    model[0].requires_grad_(False)
    train(model, optimizer, 2)
    assert handle.summary()["layers"]["0.weight"]["elements"] is None
    model[0].requires_grad_(True)
    for step in range(2, 5):
        expected = step_with_reference(model, optimizer, step)
    for layer, totals in totals_of(handle).items():
        _, _, u, e = expected[layer]
        assert totals["intended_squared_sum"] == pytest.approx(float(u @ u), rel=1e-9)
        assert totals["intended_effective_sum"] == pytest.approx(float(u @ e), rel=1e-9)


@pytest.mark.slow
def test_groups_with_their_own_settings_and_added_later():
    model = mlp()
    decayed = [p for p in model.parameters() if p.dim() > 1][:2]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    _, optimizer, handle = watched(lambda _: adamw(groups), model, sample="all")
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": [model[4].weight], "betas": (0.8, 0.95)})
    for step in range(2, 5):
        expected = step_with_reference(model, optimizer, step)
    totals = totals_of(handle)
    assert set(totals) == {name for name, _ in model.named_parameters()}
    for layer, values in totals.items():
        u = expected[layer][2]
        assert values["intended_squared_sum"] == pytest.approx(float(u @ u), rel=1e-9)


def test_layers_of_any_memory_order_are_sampled_alike():
    torch.manual_seed(0)
    model = torch.nn.Conv2d(16, 32, 3).to(torch.bfloat16)
    model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
    _, optimizer, handle = watched(model=model, sample=1024)
    whole = watch(model, optimizer, every=1, sample="all")
    train(model, optimizer, 3, lambda own, step: mean_square(own, torch.randn(2, 16, 8, 8)))
    sampled, truth = totals_of(handle)["weight"], totals_of(whole)["weight"]
    assert sampled["sampled"] == 1024
    assert sampled["intended_squared_sum"] == pytest.approx(truth["intended_squared_sum"], rel=0.2)
    assert sampled["lost"] + sampled["faithful"] + sampled["distorted"] == pytest.approx(truth["elements"])


def test_elements_that_are_not_finite_are_counted_and_left_out():
    model, optimizer, handle = watched(partial(torch.optim.SGD, lr=1e-2, momentum=0.9), sample="all", steps=2)
    backward(model, 2)
    model[0].weight.grad[0, :3] = torch.nan
    model[0].weight.grad[1, 0] = torch.inf
    optimizer.step()
    values = handle.summary()["layers"]["0.weight"]
    assert values["nonfinite"] == values["nonfinite_grads"] == values["nonfinite_params"] == 4
    assert 0 < values["edq_ratio"] < 2
    assert handle.summary()["layers"]["2.weight"]["nonfinite"] == 0


def test_a_learning_rate_far_below_fp32_resolution_is_not_idle():
    make = partial(adamw, lr=1e-9, weight_decay=0.0)
    _, _, handle = watched(make, mlp(dtype=torch.float32), sample="all", steps=3)
    values = handle.summary()["model"]
    assert values["idle"] < 0.01 * values["elements"]
    assert values["lost_update_ratio"] > 0.5


def test_counters_on_the_host_make_buckets_and_counters_on_a_device_take_tensors_out():
    assert out_of_lock_step([{"step": torch.tensor(3.0)}, {"step": torch.tensor(4.0)}]) is None
    assert out_of_lock_step([{}]) is None
    assert differing_counters([*torch.tensor([3.0, 4.0, 3.0])]).tolist() == [False, True, False]
    on_device = [{"step": torch.zeros((), device="meta")}]
    found = out_of_lock_step(on_device)
    assert found is not None
    assert found.shape == (1,)


def test_states_that_appear_are_no_reason_to_draw_again(monkeypatch):
    """The first step makes them, so the second measured one is planned anew; another dtype has other blocks."""
    drawn: list[str] = []

    def noted(name, *given, **own):
        drawn.append(name)
        return draw(name, *given, **own)

    monkeypatch.setattr(bucket_planner, "draw", noted)
    model, optimizer, handle = watched(sample=256, steps=3)
    names = [name for name, _ in model.named_parameters()]
    assert drawn == names
    model.float()
    optimizer.state.clear()
    train(model, optimizer, 2, start=3)
    assert drawn == names * 2
    assert handle.summary()["model"]["edq_ratio"] == pytest.approx(1, abs=1e-3)


class Preconditioned(torch.optim.SGD):
    """Keeps a matrix for each dimension, as Shampoo does; of a square weight, that is one number an element."""

    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            for number, size in enumerate(weight.shape):
                self.state[weight].setdefault(f"pre_cond_{number}", torch.eye(size)).mul_(0.9)
        return super().step(closure)


def test_states_that_only_some_tensors_keep_for_each_element_spoil_no_measurement():
    """They are made in the first step, before which tensors look alike."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
    optimizer = Preconditioned(model.parameters(), lr=0.1)
    handle = watch(model, optimizer, every=1, sample="all")
    for step in (1, 2):
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        assert handle.summary()["step"] == step
        assert set(totals_of(handle)) == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.slow
def test_tiles_of_any_size_give_the_same_numbers(monkeypatch):
    """Those of a device are larger than those of a cache."""
    found = []
    for slots in (512, 4096, observed_step.TILE_SLOTS):
        monkeypatch.setattr(observed_step, "TILE_SLOTS", slots)
        _, _, handle = watched(sample="all", oracle=True, steps=3)
        found.append(handle.summary())
    assert found[0] == found[1] == found[2]
    host, device = (observed_step.tile_slots(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert device > host
    assert device % MAXIMUM_BLOCK == host % MAXIMUM_BLOCK == 0


light = partial(CollageAdamW, lr=1e-3, strategy="light")


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("lr", [1e-3, 0.2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decay_of_a_step_equals_the_exact_sums(dtype, lr):
    model, optimizer, handle = watched(
        partial(adamw, lr=lr, weight_decay=0.1), mlp(dtype=dtype), sample="all", steps=1
    )
    before = {name: p.detach().double().flatten().clone() for name, p in model.named_parameters()}
    train(model, optimizer, 1, start=1)
    layout = LAYOUTS[str(dtype).removeprefix("torch.")]
    for layer, totals in totals_of(handle).items():
        kept, intended = diagnostics.decay(diagnostics.exact(before[layer]), lr * 0.1, layout)
        assert totals["decay_squared_sum"] == pytest.approx(float(intended), rel=1e-12)
        assert totals["decay_kept_sum"] == pytest.approx(float(kept), rel=1e-12, abs=1e-300)
    ratio = handle.summary()["model"]["decay_ratio"]
    assert ratio == 0.0 if dtype == torch.bfloat16 and lr < 0.1 else ratio > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["all", 256])
def test_residuals_of_a_pair_equal_the_exact_ones(sample):
    model, optimizer, handle = watched(light, mlp(width=40), sample=sample, steps=1)
    first = handle.summary()["model"]
    assert first["residual_zero_ratio"] == 1.0
    assert first["residual_fill_ratio"] == 0.0
    train(model, optimizer, 1, start=1)
    named = dict(model.named_parameters())
    kept = {name: optimizer.stored_parameter(p).flatten() for name, p in named.items()}
    before = {name: p.detach().double().flatten() for name, p in named.items()}
    train(model, optimizer, 1, start=2)
    for layer, totals in totals_of(handle).items():
        values, residual = before[layer], kept[layer] - before[layer]
        assert totals["residual_elements"] == pytest.approx(values.numel())
        if sample != "all":
            continue
        zero, fill, octaves = diagnostics.residuals(diagnostics.exact(residual), values.tolist(), torch.bfloat16)
        assert totals["residual_zero"] == zero
        assert totals["residual_fill_sum"] == pytest.approx(float(fill), rel=1e-12)
        assert [totals[f"residual_fill_histogram/{label}"] for label in HISTOGRAM_LABELS] == octaves
    model_values = handle.summary()["model"]
    assert 0.3 < model_values["residual_fill_ratio"] < 0.6
    assert model_values["residual_zero_ratio"] < 0.2
    assert model_values["residual_nonfinite"] == 0


def test_a_residual_that_is_zero_again_was_dropped():
    model, optimizer, handle = watched(light, sample="all", steps=1)
    assert handle.summary()["model"]["residual_dropped_ratio"] == 0.0
    train(model, optimizer, 4, start=1)
    assert handle.summary()["model"]["residual_dropped_ratio"] < 0.02
    dropped = optimizer.state[model[0].weight]["parameter_low"]
    held = int(dropped.count_nonzero())
    dropped.zero_()
    train(model, optimizer, 1, start=5)
    layers = handle.summary()["layers"]
    assert ("residual_dropped_ratio", "0.weight") in [(one.key, one.layer) for one in handle.judgement().against]
    assert 0 < held <= 30 * 70
    assert totals_of(handle)["0.weight"]["residual_dropped"] == held
    assert layers["0.weight"]["residual_dropped_ratio"] == pytest.approx(held / (30 * 70))
    assert layers["2.weight"]["residual_dropped_ratio"] < 0.05
    train(model, optimizer, 1, start=6)
    assert handle.summary()["model"]["residual_dropped_ratio"] < 0.02


def test_a_residual_that_is_not_finite_is_counted_and_left_out():
    model, optimizer, handle = watched(light, sample="all", steps=2)
    optimizer.state[model[0].weight]["parameter_low"][0, :3] = torch.nan
    train(model, optimizer, 1, start=2)
    values = handle.summary()["layers"]["0.weight"]
    assert values["residual_nonfinite"] == 3
    assert totals_of(handle)["0.weight"]["residual_elements"] == 30 * 70 - 3
    assert values["residual_fill_ratio"] < 0.6


@pytest.mark.slow
def test_states_that_underflow_are_counted_where_the_gradient_is_not_zero():
    model, optimizer, handle = watched(model=small_gpt(layers=1), sample="all", steps=3, loss_of=gpt_loss)
    with torch.no_grad():
        optimizer.state[model.position.weight]["exp_avg_sq"][:3] = 0.0
    backward(model, 3, gpt_loss)
    model.position.weight.grad[:3] *= 1e-30
    named = dict(model.named_parameters())
    gradients = {name: p.grad.double().flatten().clone() for name, p in named.items()}
    optimizer.step()
    for layer, totals in totals_of(handle).items():
        for state in ("exp_avg", "exp_avg_sq"):
            after = optimizer.state[named[layer]][state].double().flatten()
            nonzero, zero = diagnostics.zeros(diagnostics.exact(gradients[layer]), diagnostics.exact(after))
            assert totals["gradient_nonzero"] == nonzero
            assert totals[f"state_zero/{state}"] == zero
    values = handle.summary()["layers"]["position.weight"]
    assert values["state_zero_ratio/exp_avg_sq"] > values["state_zero_ratio/exp_avg"] == 0.0
