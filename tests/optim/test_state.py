"""States: what is kept, how many bytes it takes, and that checkpoints bring back every bit."""

import copy
import io
import pickle
from functools import cache

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, StateStorage

from tests.optim.models import assert_same_bits, give_gradients, parameters, tensors_of, train
from tests.reference.stored import reference_value

BYTES = {
    "plain": 8,
    "stochastic": 8,
    "kahan": 10,
    "light": 10,
    "light-stochastic": 10,
    "plus": 12,
    "full": 14,
    "fp32-states": 12,
    "split-master": 12,
    "split-master-16bit": 10,
    "split-master-8bit": 8 + 2 * 4 / 128,
    "split-24bit-8bit": 7 + 2 * 4 / 128,
    "coupled-9": 9 + 2 * 4 / 128,
    "coupled-8": 8 + 2 * 4 / 128,
    "coupled-7": 7 + 2 * 4 / 128,
    "master-weights": 16,
}

SINGLE = {"step", "exp_avg", "exp_avg_sq"}
KEYS = {
    "plain": SINGLE,
    "stochastic": SINGLE,
    "kahan": SINGLE | {"parameter_low"},
    "light": SINGLE | {"parameter_low"},
    "light-stochastic": SINGLE | {"parameter_low"},
    "plus": SINGLE | {"exp_avg_sq_low", "parameter_low"},
    "full": SINGLE | {"exp_avg_low", "exp_avg_sq_low", "parameter_low"},
    "fp32-states": SINGLE,
    "split-master": SINGLE | {"exp_avg_low", "exp_avg_sq_low", "parameter_low"},
    "split-master-16bit": SINGLE | {"parameter_low"},
    "split-master-8bit": SINGLE | {"exp_avg_scale", "exp_avg_sq_scale", "parameter_low"},
    "split-24bit-8bit": SINGLE | {"exp_avg_scale", "exp_avg_sq_scale", "parameter_low"},
    "coupled-9": SINGLE | {"exp_avg_scale", "exp_avg_sq_scale", "parameter_low"},
    "coupled-8": SINGLE | {"exp_avg_scale", "exp_avg_sq_scale", "parameter_low"},
    "coupled-7": (SINGLE - {"exp_avg_sq"}) | {"exp_avg_scale", "exp_avg_sq_scale", "parameter_low"},
    "master-weights": SINGLE | {"master_parameter"},
}

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
def test_keys(strategy):
    members = parameters()
    optimizer = CollageAdamW(members, strategy=strategy)
    train(optimizer, members, 1)
    assert set(optimizer.state[members[0]]) == KEYS[strategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_per_parameter(strategy):
    """Weights, states and gradient, from the storages themselves; the step counters are left out."""
    members = parameters(shapes=((128, 64), (8192,)))
    optimizer = CollageAdamW(members, strategy=strategy)
    train(optimizer, members, 2)
    tensors = [tensor for key, tensor in tensors_of(optimizer).items() if key[2] != "step"]
    tensors += [member.grad for member in members]
    found = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert found == BYTES[strategy] * sum(member.numel() for member in members)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_resumes_from_a_file_bit_for_bit(strategy):
    """With a third average; every rule, dtype and arithmetic: test_resume.py."""
    members = parameters()
    straight = CollageAdamW(members, strategy=strategy, amsgrad=True, lr=3e-3)
    train(straight, members, 8)
    saved = io.BytesIO()
    torch.save({"optimizer": straight.state_dict(), "parameters": members}, saved)
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=False)
    resumed = CollageAdamW(checkpoint["parameters"], strategy=strategy)
    resumed.load_state_dict(checkpoint["optimizer"])
    assert_same_bits(straight, resumed)
    train(straight, members, 8, first=9)
    train(resumed, checkpoint["parameters"], 8, first=9)
    assert_same_bits(straight, resumed)


def test_state_dict_is_plain_data():
    """It can be loaded without running code from the file."""
    members = parameters()
    optimizer = CollageAdamW(members)
    train(optimizer, members, 1)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=True)["param_groups"][0]["strategy"] == "split-master"


@pytest.mark.drawn
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_go_on_alike(strategy, duplicate):
    members = parameters()
    optimizer = CollageAdamW(members, strategy=strategy)
    train(optimizer, members, 3)
    other = duplicate(optimizer)
    train(optimizer, members, 3, first=4)
    train(other, other.param_groups[0]["params"], 3, first=4)
    assert_same_bits(optimizer, other)


@cache
def trained(strategy):
    """Weights and their optimizer after 20 steps, to be read only."""
    members = parameters()
    optimizer = CollageAdamW(members, strategy=strategy, lr=7e-3)
    train(optimizer, members, 20)
    return members, optimizer


@pytest.mark.drawn
@pytest.mark.parametrize("target", STRATEGIES)
@pytest.mark.parametrize("source", STRATEGIES)
def test_checkpoints_load_across_strategies(source, target):
    """Values survive as well as the target can hold them; hyper-parameters follow, the strategy does not."""
    members, first = trained(source)
    others = [torch.nn.Parameter(member.detach().clone()) for member in members]
    second = CollageAdamW(others, strategy=target)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.strategy == target
    assert second.param_groups[0]["lr"] == 7e-3
    for member, other in zip(members, others, strict=True):
        old, new = first.state[member], second.state[other]
        assert set(new) == KEYS[target]
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
    train(second, others, 1)


@pytest.mark.parametrize(
    ("source", "target", "is_dropped", "began"),
    [
        ("plain", "light", False, 20),
        ("plain", "split-master", False, 20),
        ("plain", "stochastic", False, 0),
        ("light", "plus", False, 0),
        ("light", "light", True, 0),
    ],
)
def test_residuals_begin_at_the_last_step_of_states_that_had_none(source, target, is_dropped, began):
    """What a checkpoint dropped is no conversion."""
    members, first = trained(source)
    saved = copy.deepcopy(first.state_dict())
    saved["state"][0]["step"] = torch.tensor(7.0)
    for state in saved["state"].values() if is_dropped else ():
        del state["parameter_low"]
    second = CollageAdamW([torch.nn.Parameter(member.detach().clone()) for member in members], strategy=target)
    second.load_state_dict(saved)
    group = second.param_groups[0]
    assert (group.get("residuals_from", 0), group.get("converted_from", "")) == (began, source if began else "")
    if began:
        taken = CollageAdamW.from_optimizer(second, strategy="plus").param_groups[0]
        assert (taken["residuals_from"], taken["converted_from"]) == (began, source)


@pytest.mark.parametrize("source", ["light", "split-master"])
def test_what_completed_a_weight_of_another_format_is_left(source):
    members, first = trained(source)
    others = [torch.nn.Parameter(member.detach().half()) for member in members]
    second = CollageAdamW(others, strategy="light")
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for other in others:
        assert torch.equal(second.stored_parameter(other), other.detach().double())


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq_low", "parameter_low"])
def test_a_state_of_another_shape_is_refused(key):
    members, first = trained("plus")
    saved = copy.deepcopy(first.state_dict())
    saved["state"][0][key] = saved["state"][0][key].flatten()[:5]
    second = CollageAdamW([torch.nn.Parameter(member.detach().clone()) for member in members], strategy="plus")
    with pytest.raises(ValueError, match=rf"holds {key} of shape \(5,\)"):
        second.load_state_dict(saved)


def test_checkpoints_of_torch_load():
    members = parameters()
    reference = torch.optim.AdamW(members, lr=5e-3, foreach=False)
    train(reference, members, 5)
    optimizer = CollageAdamW(members, strategy="plus")
    optimizer.load_state_dict(reference.state_dict())
    assert set(optimizer.state[members[0]]) == KEYS["plus"]
    assert torch.equal(optimizer.state[members[0]]["exp_avg"], reference.state[members[0]]["exp_avg"])
    train(optimizer, members, 1)


def test_hooks_on_loading_are_respected():
    members = parameters()
    optimizer = CollageAdamW(members, strategy="master-weights")
    train(optimizer, members, 2)

    def scale(_, state_dict):
        state_dict["state"] = {
            key: {**value, "exp_avg": value["exp_avg"] * 2} for key, value in state_dict["state"].items()
        }
        return state_dict

    second = CollageAdamW(members, strategy="master-weights")
    second.register_load_state_dict_pre_hook(scale)
    second.load_state_dict(optimizer.state_dict())
    assert torch.equal(second.state[members[0]]["exp_avg"], optimizer.state[members[0]]["exp_avg"] * 2)
    assert len(second._optimizer_load_state_dict_pre_hooks) == 1


def test_counter_survives_a_low_precision_default_dtype():
    members = parameters()
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = CollageAdamW(members)
        give_gradients(members, step=1)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[members[0]]["step"].dtype == torch.float32


@pytest.mark.parametrize("change", ["all", "one", "counter", "moved"])
def test_a_state_that_is_replaced_between_two_steps_is_seen(change):
    """As at the first steps, of all members or of one; or the same numbers in other memory."""
    members, expected = parameters(), parameters()
    optimizer, other = (CollageAdamW(own, strategy="plus") for own in (members, expected))
    for own, its in ((optimizer, members), (other, expected)):
        train(own, its, 2)
    if change == "all":
        optimizer.state.clear()
    elif change == "one":
        del optimizer.state[members[1]]
    elif change == "counter":
        optimizer.state[members[1]].pop("step")
    else:
        optimizer.state[members[1]] = {key: own.clone() for key, own in optimizer.state[members[1]].items()}
    train(optimizer, members, 1, first=3)
    train(other, expected, 1, first=3)
    fresh = {"all": range(len(members)), "moved": ()}.get(change, (1,))
    for index, (member, its) in enumerate(zip(members, expected, strict=True)):
        assert optimizer.state[member]["step"] == (1 if index in fresh else 3)
        assert torch.equal(member, its) == (index not in fresh)
