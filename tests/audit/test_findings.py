"""What an audit finds in checkpoints of real optimizers, ours and of other libraries, and in damaged ones."""

import bitsandbytes
import pytest
import pytorch_optimizer
import torch
from collage_agent.audit import audit_checkpoint, read_checkpoint
from collage_agent.audit.checkpoint_parameters import checkpoint_parameters
from collage_optim import STRATEGIES, CollageAdamW
from torch import nn

from collage_monitor.strategies import STRATEGIES as CATALOGUE
from tests.audit.checkpoints import hugging_face, saved, trained
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


def the(audit, code):
    """The one finding of this code."""
    (finding,) = [finding for finding in audit.findings if finding.code == code]
    return finding


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
    finding = the(audit, "component-missing")
    told = "the low component of exp_avg_sq" if key == "exp_avg_sq_low" else key
    assert finding.text.startswith(f"{told} (strategy {strategy!r}) is missing for 6 parameters")
    assert len(finding.layers) == 6


def cast(key, *dtypes):
    """Each state's tensor of this name is cast to the dtypes in turn."""

    def change(weights, states):
        for state in states.values():
            for dtype in dtypes:
                state[key] = state[key].to(dtype)

    return change


def cast_weights(dtype):
    return lambda weights, states: weights.update({name: own.to(dtype).float() for name, own in weights.items()})


def scaled(name, factor):
    return lambda weights, states: weights[name].mul_(factor)


def zeroed(weights, states):
    states[0]["parameter_low"].zero_()


def broken(value):
    def change(weights, states):
        weights["0.bias"][3] = value
        states[2]["exp_avg"][1] = value

    return change


def named(model):
    return torch.optim.AdamW(model.named_parameters(), lr=1e-3, betas=(0.9, 0.95))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = [f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")]
MATRICES = ["0.weight", "2.weight"]
PLACES = ["0.bias (weight)", "1.weight (exp_avg)"]
light, split, masters = (collage(strategy) for strategy in ("light", "split-master", "master-weights"))


@pytest.mark.parametrize(
    ("make", "dtype", "change", "code", "severity", "layers", "words"),
    [
        (split, BF16, cast("parameter_low", BF16), "remainder-cast", "problem", NAMES, ""),
        (light, BF16, zeroed, "residual-zero", "problem", ["0.weight"], ""),
        (light, BF16, scaled("2.weight", 2**-6), "residual-foreign", "warning", ["2.weight"], ""),
        (masters, BF16, scaled("0.weight", 1.5), "master-stale", "problem", ["0.weight"], ""),
        (masters, BF16, cast("master_parameter", BF16, FP32), "master-rounded", "problem", MATRICES, ""),
        (named, FP32, cast("exp_avg_sq", BF16), "states-cast", "warning", NAMES, ""),
        (adamw, FP32, cast("step", BF16), "counter-narrow", "problem", NAMES, "counts to 256 and no further"),
        (
            adamw,
            FP32,
            cast("step", torch.int8),
            "counter-narrow",
            "problem",
            NAMES,
            "to 127 and no further: it stands at 12",
        ),
        (adamw, FP32, cast_weights(BF16), "weights-cast", "warning", MATRICES, "bfloat16"),
        (adamw, FP32, cast_weights(FP16), "weights-cast", "warning", MATRICES, "float16"),
        (adamw, BF16, broken(float("nan")), "nonfinite", "problem", PLACES, ""),
        (adamw, BF16, broken(float("inf")), "nonfinite", "problem", PLACES, ""),
        (named, BF16, lambda weights, states: states.pop(1), "no-state", "note", ["0.bias"], ""),
    ],
)
def test_a_damage_is_found_for_what_it_is(tmp_path, make, dtype, change, code, severity, layers, words):
    model, optimizer = trained(make, dtype=dtype)
    before = codes(audited(tmp_path, model, optimizer))
    audit = audited(tmp_path, model, optimizer, change=change)
    assert codes(audit) - before == {code}
    finding = the(audit, code)
    assert (finding.severity, finding.layers) == (severity, layers)
    assert words in finding.text


@pytest.mark.parametrize(
    ("dtype", "strategy", "found"),
    [
        (BF16, "plain", {"single-weight", "second-moment-stuck", "learning-rate-lost"}),
        (FP32, "float32", set()),
    ],
)
def test_torch_is_seen_as_it_is_and_never_called_healthy(tmp_path, dtype, strategy, found):
    audit = audited(tmp_path, *trained(adamw, dtype=dtype))
    assert [entry.strategy for entry in audit.kept] == [strategy]
    assert codes(audit) == found
    assert audit.learning_rate == 1e-3
    assert "nothing here proves a run healthy" in audit.conclusion


@pytest.mark.parametrize(
    ("make", "dtype", "scale", "code", "layers"),
    [
        (collage("light", (0.9, 0.999)), BF16, 1.0, "second-moment-stuck", 6),
        (collage("light"), BF16, 1.0, "second-moment-stuck", 0),
        (collage("plus", (0.9, 0.999)), BF16, 1.0, "second-moment-stuck", 0),
        (collage("light-stochastic", (0.9, 0.999)), BF16, 1.0, "second-moment-stuck", 0),
        (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), BF16, 1.0, "second-moment-stuck", 6),
        (lambda model: torch.optim.AdamW(model.parameters(), eps=1e-4), FP16, 1e-2, "second-moment-zero", 6),
    ],
)
def test_a_second_moment_that_cannot_decay_or_fell_to_zero_is_found(tmp_path, make, dtype, scale, code, layers):
    """A parameter with two of them counts once."""
    audit = audited(tmp_path, *trained(make, dtype=dtype, scale=scale))
    found = [finding for finding in audit.findings if finding.code == code]
    assert [(finding.severity, len(finding.layers)) for finding in found] == [("problem", layers)] * bool(layers)
    assert all(f"in {layers} parameters" in finding.text for finding in found)


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
    assert audit.findings[0].text.startswith(f"{key} (")
    alone = audited(tmp_path, model, learning_rate=3e-6)
    assert audit.total.lost_ratio < 0.1 < 0.5 < alone.total.lost_ratio


def dropped(key, remainder):
    return torch.zeros_like(remainder)


def cast_to_floats(key, remainder):
    return remainder.half() if key == "error_bits" else remainder.view(torch.int16).bfloat16()


@pytest.mark.parametrize(("damage", "code"), [(dropped, "residual-zero"), (cast_to_floats, "remainder-cast")])
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
    assert the(audit, "remainder-foreign").layers == ["2.weight"]


def test_a_healthy_folder_has_no_problem_and_a_stale_one_is_found(tmp_path):
    torch.manual_seed(0)
    layers = {f"layer{number}": nn.Linear(8, 8) for number in (10, 2, 0, 1)}
    model = nn.ModuleDict(layers).bfloat16()
    optimizer = collage("master-weights")(model)
    for _ in range(4):
        outputs = [layer(torch.ones(2, 8, dtype=torch.bfloat16)).float() for layer in model.values()]
        loss = (torch.stack(outputs) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    audit = audit_checkpoint(hugging_face(tmp_path, model, optimizer))
    assert codes(audit, "problem") == set()
    assert not any("could not be matched" in note for note in audit.notes)
    assert {layer.name for layer in audit.layers} == set(dict(model.named_parameters()))
    stale = hugging_face(tmp_path, model, optimizer, lambda weights: weights["layer2.weight"].mul_(2))
    changed = audit_checkpoint(stale)
    (told,) = (finding for finding in changed.findings if finding.severity == "problem")
    assert (told.code, told.layers) == ("master-stale", ["layer2.weight"])


def test_weights_and_states_that_are_not_paired_are_not_compared(tmp_path):
    model, optimizer = trained(collage("light"))
    audit = audit_checkpoint(hugging_face(tmp_path, model, optimizer))
    assert codes(audit, "problem") == set()
    assert "residual-foreign" not in codes(audit)
    assert any("3 of 6 parameters" in note for note in audit.notes)
    whole = audited(tmp_path, model, optimizer)
    assert audit.total is not None
    assert whole.total is not None
    assert audit.elements == whole.elements


@pytest.mark.parametrize("kind", [pytorch_optimizer.Adan, pytorch_optimizer.CAME])
def test_three_betas_give_no_estimate_and_are_no_error(tmp_path, kind):
    audit = audited(tmp_path, *trained(lambda model: kind(model.parameters(), lr=1e-3)))
    assert audit.total.lost_ratio is not None
    assert audit.total.estimated_lost_ratio is None


@pytest.mark.parametrize(
    ("rate", "read"),
    [(torch.tensor(2.0**-10), 2.0**-10), (None, None), (torch.tensor([1e-3, 1e-4]), None), ("relative", None)],
)
def test_a_learning_rate_in_a_tensor_is_read_and_one_that_is_no_number_is_none(tmp_path, rate, read):
    model, optimizer = trained(adamw)
    optimizer.param_groups[0]["lr"] = rate
    audit = audited(tmp_path, model, optimizer)
    assert audit.learning_rate == read
    assert any("no learning rate" in note for note in audit.notes) == (read is None)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_one_byte_are_read(tmp_path, dtype):
    weight = torch.randn(64, 64).to(dtype)
    torch.save({"sound": weight, "scale": torch.ones(64)}, tmp_path / "sound.pt")
    assert codes(audit_checkpoint(tmp_path / "sound.pt", 1e-4), "problem") == {"learning-rate-lost"}
    broken = weight.float()
    broken[3, 4] = float("nan")
    torch.save({"broken": broken.to(dtype), "scale": torch.ones(64)}, tmp_path / "broken.pt")
    audit = audit_checkpoint(tmp_path / "broken.pt")
    assert codes(audit, "problem") == {"nonfinite"}
    assert the(audit, "nonfinite").layers == ["broken (weight)"]


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=1e-3)


def factored(model):
    """The state of transformers' Adafactor: rows and columns of a matrix are vectors, as biases are."""
    states: dict[int, dict[str, object]] = {}
    for number, parameter in enumerate(model.parameters()):
        names = ("exp_avg_sq",) if parameter.dim() == 1 else ("exp_avg_sq_row", "exp_avg_sq_col")
        vectors = {name: torch.ones(length) for name, length in zip(names, parameter.shape, strict=True)}
        states[number] = {"step": 3, "RMS": torch.ones(()), **vectors}
    return {"state": states, "param_groups": [{"params": list(states), "lr": None, "beta1": None}]}


def test_factored_states_without_names_find_their_weights(tmp_path):
    model, optimizer = trained(adafactor)
    for state_dict in (optimizer.state_dict(), factored(model)):
        path = saved(tmp_path / "a.pt", model, state=state_dict)
        kept, notes = checkpoint_parameters(read_checkpoint(path))
        assert notes == []
        assert [entry.name for entry in kept] == [name for name, _ in model.named_parameters()]
        assert all(entry.paired and entry.weight is not None for entry in kept)
        assert audit_checkpoint(path).elements == 2064


def test_a_broken_weight_is_found_whose_states_have_none_of_its_shape(tmp_path):
    def break_one(weights, states=None):
        weights["2.weight"][3, 4] = float("nan")

    model, optimizer = trained(adafactor)
    for audit in (
        audited(tmp_path, model, optimizer, change=break_one),
        audit_checkpoint(hugging_face(tmp_path / "folder", model, optimizer, break_one)),
    ):
        assert the(audit, "nonfinite").layers == ["2.weight (weight)"]
        assert audit.elements == 2064


def test_weights_that_nothing_steps_are_looked_at_and_called_neither_dropped_nor_too_coarse(tmp_path):
    model, optimizer = trained(lambda model: torch.optim.AdamW(list(model.named_parameters())[:2], lr=1e-3))
    model[2].weight.data[0, 0] = float("nan")
    audit = audited(tmp_path, model, optimizer)
    assert the(audit, "nonfinite").layers == ["2.weight (weight)"]
    assert "no-state" not in codes(audit)
    assert audit.elements == 2064
    assert len(audit.layers) == 2


def test_sgd_without_momentum_keeps_no_state_and_is_not_judged_by_the_learning_rate(tmp_path):
    audit = audited(tmp_path, *trained(lambda model: torch.optim.SGD(model.parameters(), lr=1e-6)))
    assert audit.findings == []
    assert [(entry.parameters, entry.elements) for entry in audit.kept] == [(6, 2064)]
    assert audit.total is None
    assert any("not of the learning rate's size" in note for note in audit.notes)


@pytest.mark.filterwarnings("ignore")
def test_8bit_states_of_bitsandbytes_are_read(tmp_path):
    def make(model):
        return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=16)

    audit = audited(tmp_path, *trained(make))
    (kept,) = audit.kept
    assert (kept.strategy, kept.parameters, kept.elements) == ("plain", 6, 2064)
    assert kept.tensors["state1"] == "uint8"
    assert "no-state" not in codes(audit)
    assert audit.notes == []
    assert audit.total is not None


def test_of_two_optimizers_only_adams_part_is_judged_by_the_learning_rate(tmp_path):
    model, adam = trained(lambda model: torch.optim.AdamW(list(model.named_parameters())[:4], lr=1e-5))
    momentum = torch.optim.SGD(list(model.named_parameters())[4:], lr=1e-5, momentum=0.9)
    momentum.step()
    audit = audit_checkpoint(saved(tmp_path / "two.pt", model, adam, second=momentum.state_dict()))
    assert len(audit.layers) == 4
    assert any("2 parameters are not of the learning rate's size" in note for note in audit.notes)
