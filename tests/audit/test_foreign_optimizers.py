"""What an audit finds in checkpoints of other libraries' optimizers."""

import bitsandbytes
import pytest
import pytorch_optimizer
import torch
from collage_agent.audit import audit_checkpoint, read_checkpoint
from collage_agent.audit.checkpoint_parameters import checkpoint_parameters

from tests.audit.checkpoints import saved, trained
from tests.audit.test_findings import adamw, audited, codes, in_a_folder


@pytest.mark.parametrize("kind", [pytorch_optimizer.Adan, pytorch_optimizer.CAME])
def test_three_betas_give_no_estimate_and_are_no_error(tmp_path, kind):
    audit = audited(tmp_path, *trained(lambda model: kind(model.parameters(), lr=1e-3)))
    assert audit.total is not None
    assert audit.total.lost_ratio is not None
    assert audit.total.estimated_lost_ratio is None


@pytest.mark.parametrize("rate", [None, torch.tensor([1e-3, 1e-4]), "relative"])
def test_a_learning_rate_that_is_no_number_is_none(tmp_path, rate):
    model, optimizer = trained(adamw)
    optimizer.param_groups[0]["lr"] = rate
    audit = audited(tmp_path, model, optimizer)
    assert audit.learning_rate is None
    assert any("no learning rate" in note for note in audit.notes)


def test_a_learning_rate_in_a_tensor_is_read(tmp_path):
    model, optimizer = trained(adamw)
    optimizer.param_groups[0]["lr"] = torch.tensor(2.0**-10)
    assert audited(tmp_path, model, optimizer).learning_rate == 2.0**-10


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_one_byte_are_read(tmp_path, dtype):
    weight = torch.randn(64, 64).to(dtype)
    torch.save({"sound": weight, "scale": torch.ones(64)}, tmp_path / "sound.pt")
    assert codes(audit_checkpoint(tmp_path / "sound.pt", 1e-4), "problem") == {"learning-rate-lost"}
    broken = weight.float()
    broken[3, 4] = float("nan")
    torch.save({"broken": broken.to(dtype), "scale": torch.ones(64)}, tmp_path / "broken.pt")
    (finding,) = [
        finding for finding in audit_checkpoint(tmp_path / "broken.pt").findings if finding.severity == "problem"
    ]
    assert finding.layers == ["broken (weight)"]


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=1e-3)


def factored(model):
    """The state of transformers' Adafactor: rows and columns of a matrix are vectors, as biases are."""
    states: dict[int, dict[str, object]] = {}
    for number, parameter in enumerate(model.parameters()):
        if parameter.dim() == 2:
            rows, columns = (torch.ones(length) for length in parameter.shape)
            states[number] = {"step": 3, "exp_avg_sq_row": rows, "exp_avg_sq_col": columns, "RMS": torch.ones(())}
        else:
            states[number] = {"step": 3, "exp_avg_sq": torch.ones(parameter.shape), "RMS": torch.ones(())}
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
    (tmp_path / "folder").mkdir()
    for audit in (
        audited(tmp_path, model, optimizer, change=break_one),
        in_a_folder(tmp_path / "folder", model, optimizer, break_one),
    ):
        (finding,) = [finding for finding in audit.findings if finding.code == "nonfinite"]
        assert finding.layers == ["2.weight (weight)"]
        assert audit.elements == 2064


def test_weights_that_nothing_steps_are_looked_at_and_called_neither_dropped_nor_too_coarse(tmp_path):
    model, optimizer = trained(lambda model: torch.optim.AdamW(list(model.named_parameters())[:2], lr=1e-3))
    model[2].weight.data[0, 0] = float("nan")
    audit = audited(tmp_path, model, optimizer)
    (finding,) = [finding for finding in audit.findings if finding.code == "nonfinite"]
    assert finding.layers == ["2.weight (weight)"]
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


def test_a_parameter_with_two_stuck_second_moments_counts_once(tmp_path):
    audit = audited(tmp_path, *trained(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)))
    (finding,) = [finding for finding in audit.findings if finding.code == "second-moment-stuck"]
    assert len(finding.layers) == 6
    assert "in 6 parameters" in finding.text


def test_of_two_optimizers_only_adams_part_is_judged_by_the_learning_rate(tmp_path):
    model, adam = trained(lambda model: torch.optim.AdamW(list(model.named_parameters())[:4], lr=1e-5))
    momentum = torch.optim.SGD(list(model.named_parameters())[4:], lr=1e-5, momentum=0.9)
    momentum.step()
    audit = audit_checkpoint(saved(tmp_path / "two.pt", model, adam, second=momentum.state_dict()))
    assert len(audit.layers) == 4
    assert any("2 parameters are not of the learning rate's size" in note for note in audit.notes)
