"""States: what is kept, how many bytes it takes, and that checkpoints bring back every bit."""

import copy
import io
import pickle
import re
from functools import cache
from typing import Any

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdam, CollageAdamW, CollageLion, CollageSGD, StateStorage

from tests.optim.models import assert_same_bits, copies_of, parameters, tensors_of, train, train_each
from tests.reference.stored import reference_value

BLOCKS = {"exp_avg_scale", "exp_avg_sq_scale", "parameter_low"}
SCALES = 2 * 4 / 128
KEPT: dict[str, tuple[float, set[str]]] = {
    "plain": (8, set()),
    "stochastic": (8, set()),
    "kahan": (10, {"parameter_low"}),
    "light": (10, {"parameter_low"}),
    "light-stochastic": (10, {"parameter_low"}),
    "plus": (12, {"exp_avg_sq_low", "parameter_low"}),
    "full": (14, {"exp_avg_low", "exp_avg_sq_low", "parameter_low"}),
    "fp32-states": (12, set()),
    "split-master": (12, {"exp_avg_low", "exp_avg_sq_low", "parameter_low"}),
    "split-master-16bit": (10, {"parameter_low"}),
    "split-master-8bit": (8 + SCALES, BLOCKS),
    "split-24bit-8bit": (7 + SCALES, BLOCKS),
    "coupled-9": (9 + SCALES, BLOCKS),
    "coupled-8": (8 + SCALES, BLOCKS),
    "coupled-7": (7 + SCALES, BLOCKS),
    "master-weights": (16, {"master_parameter"}),
}
"""Bytes of a parameter with its gradient, and the states beside the averages."""


def keys_of(strategy):
    """coupled-7 packs both averages into one."""
    averages = {"exp_avg"} if strategy == "coupled-7" else {"exp_avg", "exp_avg_sq"}
    return KEPT[strategy][1] | averages | {"step"}


PRECISION = {
    StateStorage.SINGLE: 2.0**-8,
    StateStorage.COMPENSATED: 2.0**-16,
    StateStorage.PAIR: 2.0**-16,
    StateStorage.WIDE: 2.0**-24,
    StateStorage.SPLIT: 2.0**-23,
    StateStorage.SPLIT_24: 2.0**-15,
    StateStorage.ROOT: 2.0**-9,
}
"""Of the value."""
IN_BLOCKS = {
    StateStorage.BLOCKS: 2e-2,
    StateStorage.BLOCKS_16: 5e-5,
    StateStorage.BLOCKS_6: 0.033,
    StateStorage.BLOCKS_10: 2e-3,
}
"""Of the largest value: a block's steps are up to 2 / 127 of its own, for roots 4 / 255 and 4 / 65,535, if packed
2 / 31 and 4 / 1,024."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_kept_and_its_bytes(strategy):
    """Weights, states and gradient, from the storages themselves; the step counters are left out."""
    members = parameters(shapes=((128, 64), (8192,)))
    optimizer = CollageAdamW(members, strategy=strategy)
    train(optimizer, members, 2)
    assert set(optimizer.state[members[0]]) == keys_of(strategy)
    tensors = [tensor for key, tensor in tensors_of(optimizer).items() if key[2] != "step"]
    tensors += [member.grad for member in members]
    found = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert found == KEPT[strategy][0] * sum(member.numel() for member in members)


def from_a_file(saved, **options):
    """What torch.save and torch.load leave of something."""
    written = io.BytesIO()
    torch.save(saved, written)
    written.seek(0)
    return torch.load(written, **options)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_resumes_from_a_file_bit_for_bit(strategy):
    """With a third average. The states alone are plain data: they are loaded without running code from the file."""
    members = parameters()
    straight = CollageAdamW(members, strategy=strategy, amsgrad=True, lr=3e-3)
    train(straight, members, 8)
    found = from_a_file(straight.state_dict(), weights_only=True)
    assert found["param_groups"][0]["strategy"] == strategy
    resumed = CollageAdamW(from_a_file(members, weights_only=False), strategy=strategy)
    resumed.load_state_dict(found)
    assert_same_bits(straight, resumed)
    train_each((straight, resumed), 8, first=9)
    assert_same_bits(straight, resumed)


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_go_on_alike(strategy, duplicate):
    members = parameters()
    optimizer = CollageAdamW(members, strategy=strategy)
    train(optimizer, members, 3)
    other = duplicate(optimizer)
    train_each((optimizer, other), 3, first=4)
    assert_same_bits(optimizer, other)


@cache
def trained(strategy):
    """Weights and their optimizer after 20 steps, to be read only."""
    members = parameters()
    optimizer = CollageAdamW(members, strategy=strategy, lr=7e-3, seed=5)
    train(optimizer, members, 20)
    return members, optimizer


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("target", STRATEGIES)
@pytest.mark.parametrize("source", STRATEGIES)
def test_checkpoints_load_across_strategies(source, target):
    """Values survive as well as the target can hold them; hyper-parameters follow, the strategy does not."""
    members, first = trained(source)
    others = copies_of(members)
    second = CollageAdamW(others, strategy=target)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.strategy == target
    assert second.param_groups[0]["lr"] == 7e-3
    for member, other in zip(members, others, strict=True):
        old, new = first.state[member], second.state[other]
        assert set(new) == keys_of(target)
        torch.testing.assert_close(
            second.stored_parameter(other),
            first.stored_parameter(member),
            rtol=PRECISION[STRATEGIES[target].parameter],
            atol=0,
        )
        for name in ("exp_avg", "exp_avg_sq"):
            kept, held = (STRATEGIES[own].moment_storage(name == "exp_avg_sq") for own in (source, target))
            # What blocks stand for is worked out in fp32.
            allowed = max(PRECISION.get(held, 0), 2.0**-20 * kept.has_scales)
            size = float(reference_value(old, name).abs().max())
            torch.testing.assert_close(
                reference_value(new, name),
                reference_value(old, name),
                rtol=allowed,
                atol=max(size * IN_BLOCKS.get(held, 0), 1e-30),
            )
        assert new["step"].item() == 20
    # Another strategy after construction is adopted as a checkpoint would be.
    changed = copy.deepcopy(first)
    changed.param_groups[0]["strategy"] = target
    train_each((changed, second), 2, first=21)
    assert_same_bits(changed, second)
    assert changed.external_writes == second.external_writes == 0


@pytest.mark.parametrize(
    ("source", "target", "began"),
    [
        ("plain", "light", 20),
        ("plain", "split-master", 20),
        ("plain", "stochastic", 0),
        ("light", "plus", 0),
        ("light", "light", 0),
    ],
)
def test_residuals_begin_at_the_last_step_of_states_that_had_none(source, target, began):
    """What a checkpoint dropped is no conversion."""
    members, first = trained(source)
    saved = copy.deepcopy(first.state_dict())
    saved["state"][0]["step"] = torch.tensor(7.0)
    for state in saved["state"].values() if source == target else ():
        del state["parameter_low"]
    second = CollageAdamW(copies_of(members), strategy=target)
    second.load_state_dict(saved)
    group = second.param_groups[0]
    assert (group.get("residuals_from", 0), group.get("converted_from", "")) == (began, source if began else "")
    if began:
        taken = CollageAdamW.from_optimizer(second, strategy="plus").param_groups[0]
        assert (taken["residuals_from"], taken["converted_from"]) == (began, source)


@pytest.mark.parametrize(
    ("key", "shape", "strategy"),
    [
        *(("exp_avg", (16, 24), name) for name in STRATEGIES),
        *((key, (384,), "plus") for key in ("exp_avg", "exp_avg_sq_low", "parameter_low")),
    ],
)
def test_a_state_of_another_shape_is_refused(key, shape, strategy):
    members, first = trained("plus")
    saved = copy.deepcopy(first.state_dict())
    saved["state"][0][key] = saved["state"][0][key].reshape(shape)
    second = CollageAdamW(copies_of(members), strategy=strategy)
    words = f"parameter 0 holds {key} of shape {shape}, its weight has shape (24, 16)"
    with pytest.raises(ValueError, match=re.escape(words)):
        second.load_state_dict(saved)
    assert not second.state


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_checkpoints_of_torch_load_without_their_forms(form):
    members = parameters()
    options: dict[str, Any] = {form: True}
    reference = torch.optim.AdamW(members, lr=5e-3, **options)
    train(reference, members, 5)
    optimizer = CollageAdamW(members, strategy="plus")
    optimizer.load_state_dict(reference.state_dict())
    assert not {"fused", "foreach", "capturable", "differentiable"} & optimizer.param_groups[0].keys()
    assert set(optimizer.state[members[0]]) == keys_of("plus")
    assert torch.equal(optimizer.state[members[0]]["exp_avg"], reference.state[members[0]]["exp_avg"])
    train(optimizer, members, 1)


def test_hooks_on_loading_are_respected():
    members = parameters()
    optimizer = CollageAdamW(members, strategy="master-weights")
    train(optimizer, members, 2)

    def scale(_, state_dict):
        states = {key: {**value, "exp_avg": value["exp_avg"] * 2} for key, value in state_dict["state"].items()}
        return {**state_dict, "state": states}

    second = CollageAdamW(members, strategy="master-weights")
    second.register_load_state_dict_pre_hook(scale)
    second.load_state_dict(optimizer.state_dict())
    assert torch.equal(second.state[members[0]]["exp_avg"], optimizer.state[members[0]]["exp_avg"] * 2)
    assert len(second._optimizer_load_state_dict_pre_hooks) == 1


def test_counter_survives_a_low_precision_default_dtype():
    members = parameters()
    torch.set_default_dtype(torch.bfloat16)
    try:
        train(optimizer := CollageAdamW(members), members, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[members[0]]["step"].dtype == torch.float32


@pytest.mark.parametrize("change", ["all", "one", "counter", "moved"])
def test_a_state_that_is_replaced_between_two_steps_is_seen(change):
    """As at the first steps, of all members or of one; or the same numbers in other memory."""
    members, expected = parameters(), parameters()
    optimizer, other = (CollageAdamW(own, strategy="plus") for own in (members, expected))
    train_each((optimizer, other), 2)
    if change == "all":
        optimizer.state.clear()
    elif change == "one":
        del optimizer.state[members[1]]
    elif change == "counter":
        optimizer.state[members[1]].pop("step")
    else:
        optimizer.state[members[1]] = {key: own.clone() for key, own in optimizer.state[members[1]].items()}
    train_each((optimizer, other), 1, first=3)
    fresh = {"all": range(len(members)), "moved": ()}.get(change, (1,))
    for index, (member, its) in enumerate(zip(members, expected, strict=True)):
        assert optimizer.state[member]["step"] == (1 if index in fresh else 3)
        assert torch.equal(member, its) == (index not in fresh)


RULES = {
    "AdamW": (CollageAdamW, {"lr": 3e-3}),
    "Adam": (CollageAdam, {"lr": 3e-3, "weight_decay": 1e-3}),
    "SGD": (CollageSGD, {"lr": 0.01, "momentum": 0.9}),
    "Lion": (CollageLion, {"lr": 1e-3}),
}
WITH_A_SECOND_MOMENT = {
    "plus": "has none: use 'light'",
    "coupled-9": "has none: use 'split-master-8bit'",
    "coupled-8": "has none: use 'split-24bit-8bit'",
    "coupled-7": "packs exp_avg and exp_avg_sq into one tensor, and .* use strategy 'split-24bit-8bit'",
}
WIDTH = 32


def refusal(rule, strategy, dtype, arithmetic):
    """The words of a refusal, or None for what must work."""
    if STRATEGIES[strategy].is_coded and arithmetic == "storage":
        return f"strategy '{strategy}' keeps other bits than those: leave arithmetic out"
    if dtype in (torch.float32, torch.float64) and strategy != "plain":
        return "is for bfloat16( and float16)? parameters"
    if STRATEGIES[strategy].is_coded and dtype == torch.float16:
        return "use bfloat16 parameters, or strategy 'master-weights'"
    if strategy in WITH_A_SECOND_MOMENT and rule in ("SGD", "Lion"):
        return WITH_A_SECOND_MOMENT[strategy]
    if dtype == torch.float16 and rule in ("AdamW", "Adam"):
        if strategy in ("plus", "full"):
            return "use bfloat16 parameters, or strategy 'master-weights'"
        if arithmetic == "storage" and strategy not in ("fp32-states", "master-weights"):
            return "eps=1e-08 rounds to zero in float16"
    return None


def small_model(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 1)
    ).to(dtype)


def losses_of(model, optimizer, steps, first):
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, WIDTH, generator=generator)
        targets = inputs[:, :3].sum(1, keepdim=True)
        optimizer.zero_grad()
        loss = ((model(inputs.to(next(model.parameters()).dtype)).float() - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.drawn(by=lambda rule, strategy, dtype, arithmetic: (rule, (strategy, arithmetic), dtype))
@pytest.mark.parametrize("arithmetic", ["fp32", "storage"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rule", RULES)
def test_training_resumes(rule, strategy, dtype, arithmetic):
    """Every rule × strategy × dtype × arithmetic trains a small model and resumes bit for bit, or is refused."""
    optimizer_class, options = RULES[rule]
    model = small_model(dtype)
    options = {**options, "strategy": strategy, "arithmetic": arithmetic}
    words = refusal(rule, strategy, dtype, arithmetic)
    if words is not None:
        with pytest.raises(ValueError, match=words):
            optimizer_class(model.parameters(), **options)
        return
    optimizer = optimizer_class(model.parameters(), **options)
    losses = losses_of(model, optimizer, 50, first=0)
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    other = small_model(dtype)
    other.load_state_dict(model.state_dict())
    resumed = optimizer_class(other.parameters(), **{**options, "lr": 1.0})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert losses_of(model, optimizer, 5, first=50) == losses_of(other, resumed, 5, first=50)
    assert_same_bits(optimizer, resumed)
