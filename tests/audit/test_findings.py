"""What an audit finds in checkpoints of real optimizers, and in the same checkpoints damaged."""

import pytest
import torch
from collage_agent.audit import audit_checkpoint
from collage_optim import STRATEGIES, CollageAdamW
from safetensors.torch import save_file
from torch import nn

from collage_monitor.strategies import STRATEGIES as CATALOGUE
from tests.audit.checkpoints import trained
from tests.keepers import replicas

REPLICAS = {
    "master_param": (replicas.Rounded, torch.bfloat16),
    "mantissa": (replicas.AppendedUnsigned, torch.bfloat16),
    "error_bits": (replicas.Fraction, torch.float16),
}
SPLIT = [name for name, strategy in STRATEGIES.items() if strategy.parameter.is_split]


def collage(strategy, betas=(0.9, 0.95), **options):
    return lambda model: CollageAdamW(model.parameters(), lr=1e-3, betas=betas, strategy=strategy, **options)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def audited(tmp_path, model, optimizer=None, *, change=None, learning_rate=None):
    """The audit after `change(weights, states)` has damaged the checkpoint."""
    content = {"model": {name: tensor.clone() for name, tensor in model.state_dict().items()}}
    if optimizer is not None:
        content["optimizer"] = optimizer.state_dict()
    if change is not None:
        change(content["model"], content.get("optimizer", {}).get("state"))
    torch.save(content, tmp_path / "checkpoint.pt")
    return audit_checkpoint(tmp_path / "checkpoint.pt", learning_rate)


def codes(audit, severity=None):
    return {finding.code for finding in audit.findings if severity in (None, finding.severity)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_of_our_strategies_is_recognised_and_nothing_is_called_dropped(tmp_path, strategy):
    model, optimizer = trained(collage(strategy))
    audit = audited(tmp_path, model, optimizer)
    assert [entry.strategy for entry in audit.kept] == [strategy]
    assert sum(entry.elements for entry in audit.kept) == sum(p.numel() for p in model.parameters())
    broken = {
        "component-missing",
        "residual-zero",
        "residual-foreign",
        "master-stale",
        "master-rounded",
        "nonfinite",
    }
    assert not codes(audit) & broken
    assert codes(audit, "problem") == set()
    assert ("single-weight" in codes(audit)) is (strategy in ("plain", "fp32-states"))
    (kept,) = audit.kept
    tensors = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    held = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *tensors])
    assert kept.bytes_per_parameter == held / 2064
    # The catalogue's bytes count the gradient, too, and no scales.
    stated = CATALOGUE[strategy].bytes_per_parameter
    assert stated is not None
    assert kept.bytes_per_parameter == pytest.approx(stated - 2, rel=0.05)


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        *((strategy, "parameter_low") for strategy in ("plus", *SPLIT)),
        ("plus", "exp_avg_sq_low"),
        ("split-master", "exp_avg_sq_low"),
        ("split-master-8bit", "exp_avg_scale"),
        ("master-weights", "master_parameter"),
    ],
)
def test_a_dropped_part_is_found(tmp_path, strategy, key):
    def drop(weights, states):
        for state in states.values():
            del state[key]

    audit = audited(tmp_path, *trained(collage(strategy)), change=drop)
    (finding,) = [finding for finding in audit.findings if finding.code == "component-missing"]
    assert finding.severity == "problem"
    told = "the low component of exp_avg_sq" if key == "exp_avg_sq_low" else key
    assert finding.text.startswith(f"{told} (strategy {strategy!r}) is missing for 6 parameters")
    assert len(finding.layers) == 6


def test_bits_below_the_weight_that_torch_cast_are_found(tmp_path):
    def cast_to_floats(weights, states):
        for state in states.values():
            state["parameter_low"] = state["parameter_low"].bfloat16()

    audit = audited(tmp_path, *trained(collage("split-master")), change=cast_to_floats)
    assert codes(audit, "problem") == {"remainder-cast"}


def test_a_zeroed_low_component_is_found(tmp_path):
    def zero(weights, states):
        states[0]["parameter_low"] = torch.zeros_like(states[0]["parameter_low"])

    audit = audited(tmp_path, *trained(collage("light")), change=zero)
    (finding,) = [finding for finding in audit.findings if finding.code == "residual-zero"]
    assert finding.layers == ["0.weight"]


def test_a_low_component_of_other_weights_is_found(tmp_path):
    def shrink(weights, states):
        weights["2.weight"].mul_(2**-6)

    audit = audited(tmp_path, *trained(collage("light")), change=shrink)
    (finding,) = [finding for finding in audit.findings if finding.code == "residual-foreign"]
    assert finding.layers == ["2.weight"]


def test_a_weight_changed_without_its_master_is_found(tmp_path):
    audit = audited(
        tmp_path, *trained(collage("master-weights")), change=lambda weights, states: weights["0.weight"].mul_(1.5)
    )
    assert [f.layers for f in audit.findings if f.code == "master-stale"] == [["0.weight"]]


def test_a_master_weight_that_went_through_bfloat16_is_found(tmp_path):
    def cast(weights, states):
        for state in states.values():
            state["master_parameter"] = state["master_parameter"].bfloat16().float()

    audit = audited(tmp_path, *trained(collage("master-weights")), change=cast)
    (finding,) = [finding for finding in audit.findings if finding.code == "master-rounded"]
    assert set(finding.layers) == {"0.weight", "2.weight"}


@pytest.mark.parametrize(
    ("strategy", "beta2", "stuck"),
    [("light", 0.999, True), ("light", 0.95, False), ("plus", 0.999, False), ("light-stochastic", 0.999, False)],
)
def test_a_second_moment_that_cannot_decay_is_found(tmp_path, strategy, beta2, stuck):
    audit = audited(tmp_path, *trained(collage(strategy, betas=(0.9, beta2))))
    assert ("second-moment-stuck" in codes(audit, "problem")) is stuck


def test_torch_in_bfloat16_is_seen_as_it_is(tmp_path):
    audit = audited(tmp_path, *trained(adamw))
    assert [entry.strategy for entry in audit.kept] == ["plain"]
    assert codes(audit) >= {"single-weight", "second-moment-stuck", "learning-rate-lost"}
    assert audit.learning_rate == 1e-3


def test_torch_in_float32_has_nothing_to_find_but_is_not_called_healthy(tmp_path):
    audit = audited(tmp_path, *trained(adamw, dtype=torch.float32))
    assert [entry.strategy for entry in audit.kept] == ["float32"]
    assert audit.findings == []
    assert "nothing here proves a run healthy" in audit.conclusion


def test_squares_that_fell_to_zero_in_float16_are_found(tmp_path):
    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

    audit = audited(tmp_path, *trained(make, dtype=torch.float16, scale=1e-2))
    assert "second-moment-zero" in codes(audit, "problem")


def test_states_cast_beside_float32_weights_are_found(tmp_path):
    def cast(weights, states):
        for state in states.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()

    audit = audited(tmp_path, *trained(adamw, dtype=torch.float32), change=cast)
    assert "states-cast" in codes(audit, "warning")


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, "256"), (torch.int8, "127"), (None, "")])
def test_a_counter_that_was_cast_is_found(tmp_path, dtype, most):
    """Code that casts every tensor casts the step, too: 1,001 becomes 1,000 and stays there."""

    def cast(weights, states):
        for state in states.values() if dtype is not None else ():
            state["step"] = state["step"].to(dtype)

    audit = audited(tmp_path, *trained(adamw, dtype=torch.float32), change=cast)
    found = [finding for finding in audit.findings if finding.code == "counter-narrow"]
    assert [finding.severity for finding in found] == (["problem"] if most else [])
    assert all(f"counts to {most} and no further: it stands at 12 in 6 parameters" in own.text for own in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_weights_that_went_through_16_bits_are_found(tmp_path, dtype):
    def cast(weights, states):
        for name in weights:
            weights[name] = weights[name].to(dtype).float()

    audit = audited(tmp_path, *trained(adamw, dtype=torch.float32), change=cast)
    (finding,) = [finding for finding in audit.findings if finding.code == "weights-cast"]
    assert str(dtype).removeprefix("torch.") in finding.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_found(tmp_path, value):
    def break_one(weights, states):
        weights["0.bias"][3] = value
        states[2]["exp_avg"][1] = value

    audit = audited(tmp_path, *trained(adamw), change=break_one)
    (finding,) = [finding for finding in audit.findings if finding.code == "nonfinite"]
    assert finding.layers == ["0.bias (weight)", "1.weight (exp_avg)"]


def test_weights_alone_say_that_little_is_known(tmp_path):
    audit = audited(tmp_path, trained(adamw)[0])
    assert codes(audit) == {"weights-only"}
    assert [entry.strategy for entry in audit.kept] == ["unknown"]


def test_a_compensation_of_another_library_is_recognised(tmp_path):
    def rename(weights, states):
        for state in states.values():
            state["kahan_comp"] = state.pop("parameter_low")

    model, optimizer = trained(collage("kahan"))
    for group in optimizer.param_groups:
        del group["strategy"]
    audit = audited(tmp_path, model, optimizer, change=rename)
    assert [entry.strategy for entry in audit.kept] == ["light or kahan"]


def test_states_that_lack_for_some_parameters_are_named(tmp_path):
    model, optimizer = trained(lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-3))
    audit = audited(tmp_path, model, optimizer, change=lambda weights, states: states.pop(1))
    (finding,) = [finding for finding in audit.findings if finding.code == "no-state"]
    assert finding.layers == ["0.bias"]


def remainders(key):
    kind, dtype = REPLICAS[key]
    return trained(lambda model: kind(list(model.named_parameters()), lr=1e-4), dtype=dtype)


@pytest.mark.parametrize("key", REPLICAS)
def test_integer_remainders_are_named_and_make_the_grid_finer(tmp_path, key):
    model, optimizer = remainders(key)
    audit = audited(tmp_path, model, optimizer, learning_rate=3e-6)
    assert [entry.strategy for entry in audit.kept] == ["integer-remainder"]
    assert "integer remainder" in audit.kept[0].tensors
    assert codes(audit) == {"remainder-kept"}
    (told,) = audit.findings
    assert told.text.startswith(f"{key} (")
    assert audit.total is not None
    alone = audited(tmp_path, model, learning_rate=3e-6)
    assert alone.total is not None
    assert audit.total.lost_ratio < 0.1 < 0.5 < alone.total.lost_ratio


def zeroed(key, remainder):
    return torch.zeros_like(remainder)


def cast(key, remainder):
    return remainder.half() if key == "error_bits" else remainder.view(torch.int16).bfloat16()


@pytest.mark.parametrize(("damage", "code"), [(zeroed, "residual-zero"), (cast, "remainder-cast")])
@pytest.mark.parametrize("key", REPLICAS)
def test_a_remainder_that_was_dropped_or_cast_is_a_problem(tmp_path, key, damage, code):
    model, optimizer = remainders(key)

    def change(weights, states):
        for state in states.values():
            state.update({"step": 12, key: damage(key, state[key])})

    assert codes(audited(tmp_path, model, optimizer, change=change), "problem") == {code}


def test_a_remainder_beside_another_weight_is_a_problem(tmp_path):
    model, optimizer = remainders("master_param")
    stored = {
        name: optimizer.decode(parameter.detach(), optimizer.state[parameter]["master_param"], 1)
        for name, parameter in model.named_parameters()
    }

    def exported(weights, states):
        weights.update(stored)

    def of_another_moment(weights, states):
        weights.update({name: weight * 1.01 for name, weight in stored.items()})

    def padded(weights, states):
        weights["2.weight"][:8] = 0

    assert "remainder-foreign" not in codes(audited(tmp_path, model, optimizer, change=exported))
    assert "remainder-foreign" in codes(audited(tmp_path, model, optimizer, change=of_another_moment), "problem")
    audit = audited(tmp_path, model, optimizer, change=padded)
    (told,) = (finding for finding in audit.findings if finding.code == "remainder-foreign")
    assert told.layers == ["2.weight"]


def in_a_folder(path, model, optimizer, change=None):
    """As Hugging Face's Trainer leaves it: safetensors, in an order of their own, and numbered states."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if change is not None:
        change(weights)
    save_file(weights, path / "model.safetensors")
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    return audit_checkpoint(path)


def deep(model):
    return CollageAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), strategy="master-weights")


def test_a_healthy_folder_has_no_problem_and_a_stale_one_is_found(tmp_path):
    torch.manual_seed(0)
    layers = {f"layer{number}": nn.Linear(8, 8) for number in (10, 2, 0, 1)}
    model = nn.ModuleDict(layers).bfloat16()
    optimizer = deep(model)
    for _ in range(4):
        outputs = [layer(torch.ones(2, 8, dtype=torch.bfloat16)).float() for layer in model.values()]
        loss = (torch.stack(outputs) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    audit = in_a_folder(tmp_path, model, optimizer)
    assert codes(audit, "problem") == set()
    assert not any("could not be matched" in note for note in audit.notes)
    assert {layer.name for layer in audit.layers} == set(dict(model.named_parameters()))

    def stale(weights):
        weights["layer2.weight"] *= 2

    changed = in_a_folder(tmp_path, model, optimizer, stale)
    (told,) = (finding for finding in changed.findings if finding.severity == "problem")
    assert (told.code, told.layers) == ("master-stale", ["layer2.weight"])


def test_weights_and_states_that_are_not_paired_are_not_compared(tmp_path):
    model, optimizer = trained(collage("light"))
    audit = in_a_folder(tmp_path, model, optimizer)
    assert codes(audit, "problem") == set()
    assert "residual-foreign" not in codes(audit)
    assert any("3 of 6 parameters" in note for note in audit.notes)
    whole = audited(tmp_path, model, optimizer)
    assert audit.total is not None
    assert whole.total is not None
    assert audit.elements == whole.elements
