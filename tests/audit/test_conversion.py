"""`collage-monitor convert`: every strategy to every other, in every layout; gains and losses are told first."""

import copy
import json

import bitsandbytes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from collage_agent.audit import CheckpointError
from collage_agent.audit.checkpoint_audit import audit_checkpoint
from collage_agent.audit.conversion import convert_checkpoint
from collage_agent.audit.split_layouts import read_checkpoint
from collage_agent.command.convert import convert
from collage_optim import STRATEGIES, CollageAdamW, CollageSGD
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict as views

from collage_monitor.strategies import STRATEGIES as CATALOGUE
from tests.audit.checkpoints import hugging_face, network, saved, tied_weights, trained

TARGETS = [name for name in STRATEGIES if name != "plain"]


def ours(strategy):
    return lambda model: CollageAdamW(model.parameters(), lr=1e-3, strategy=strategy)


def torchs(model):
    return torch.optim.AdamW(model.named_parameters(), lr=1e-3)


def resumed(weights, optimizer_state, strategy):
    """A model and an optimizer of the strategy that start from a converted checkpoint."""
    model = network()
    model.load_state_dict(weights)
    optimizer = CollageAdamW(model.parameters(), strategy=strategy)
    optimizer.load_state_dict(optimizer_state)
    return model, optimizer


def converted_to(strategy, path, output):
    """What is written under the strategy."""
    convert_checkpoint(path, strategy).write(output)
    return torch.load(output, weights_only=True)


def assert_same_state(found, expected):
    """found, expected: models with their optimizers."""
    (model, optimizer), (other, its) = found, expected
    for first, second in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)
        ours, theirs = optimizer.state[first], its.state[second]
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert value.dtype == theirs[key].dtype, key
            assert torch.equal(value, theirs[key]), key


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("source", STRATEGIES)
@pytest.mark.parametrize("target", STRATEGIES)
def test_what_is_written_is_what_loading_converts_to(source, target, tmp_path):
    model, optimizer = trained(ours(source))
    path = saved(tmp_path / "run.pt", model, optimizer, step=12)
    converted = convert_checkpoint(path, target)
    converted.write(tmp_path / "new.pt")
    content = torch.load(tmp_path / "new.pt")
    assert content["step"] == 12
    assert content["optimizer"]["param_groups"][0]["strategy"] == target
    found = resumed(content["model"], content["optimizer"], target)
    expected = resumed(model.state_dict(), copy.deepcopy(optimizer.state_dict()), target)
    assert_same_state(found, expected)
    report = converted.report
    assert (report.source, report.target, report.parameters) == ([source], target, 6)
    assert report.elements == 2064
    # The catalogue's bytes count the gradient, too.
    for name, held in ((source, report.bytes_before), (target, report.bytes_after)):
        stated = CATALOGUE[name].bytes_per_parameter
        assert stated is None or held == pytest.approx((stated - 2) * 2064, rel=0.1)
    if source == target:
        assert (report.gained, report.lost, report.never_kept) == ([], [], [])
        for loaded, own in zip(content["optimizer"]["state"].values(), optimizer.state.values(), strict=True):
            assert all(torch.equal(loaded[key], own[key]) for key in own)


@pytest.mark.parametrize(
    ("build", "source"),
    [(ours("plain"), "plain"), (torchs, "plain"), (ours("light"), ""), (ours("master-weights"), "")],
)
def test_what_began_empty_is_noted_in_the_checkpoint_and_is_no_problem(build, source, tmp_path):
    model, optimizer = trained(build)
    path = saved(tmp_path / "run.pt", model, optimizer, step=12)
    group = converted_to("split-master", path, tmp_path / "new.pt")["optimizer"]["param_groups"][0]
    steps = int(max(state["step"] for state in optimizer.state.values()))
    assert group.get("converted_from", "") == source
    assert group.get("residuals_from", 0) == (steps if source else 0)
    found = audit_checkpoint(tmp_path / "new.pt").findings
    assert "problem" not in [finding.severity for finding in found]
    assert ("converted" in [finding.code for finding in found]) == bool(source)


def test_what_is_equal_lost_and_never_kept_is_told(tmp_path):
    path = saved(tmp_path / "plus.pt", *trained(ours("plus")))
    report = convert_checkpoint(path, "full").report
    assert report.lost == []
    assert report.gained == ["a residual of exp_avg, which begins at zero"]
    report = convert_checkpoint(path, "master-weights").report
    assert report.gained == ["a master weight"]
    # A pair at a tie rounds to its weight, an fp32 number to even: it is moved off the tie.
    assert all((loss.component, loss.largest_relative_change <= 2**-23) == ("weight", True) for loss in report.lost)
    report = convert_checkpoint(path, "light").report
    (loss,) = report.lost
    assert loss.component == "exp_avg_sq"
    assert loss.changed_ratio > 0.9
    assert 2**-12 < loss.largest_relative_change <= 2**-8
    report = convert_checkpoint(path, "plain").report
    assert {loss.component for loss in report.lost} == {"weight", "exp_avg_sq"}
    path = saved(tmp_path / "plain.pt", *trained(ours("plain")))
    report = convert_checkpoint(path, "plus").report
    both = ("weight", "exp_avg_sq")
    assert report.gained == [f"a residual of {name}, which begins at zero" for name in both]
    never = "what rounding has taken from {} so far: it was never kept, of 2,064 weights"
    assert report.never_kept == [never.format(name) for name in both]
    assert not report.lost


@pytest.mark.parametrize("target", TARGETS)
def test_an_fp32_run_of_torch_keeps_its_weights_as_far_as_the_strategy_can(target, tmp_path):
    model, optimizer = trained(torchs, dtype=torch.float32)
    content = converted_to(target, saved(tmp_path / "fp32.pt", model, optimizer), tmp_path / "new.pt")
    assert {tensor.dtype for tensor in content["model"].values()} == {torch.bfloat16}
    new, kept = resumed(content["model"], content["optimizer"], target)
    for own, wide in zip(new.parameters(), model.parameters(), strict=True):
        assert torch.equal(own.detach(), wide.detach().bfloat16())
        error = (kept.stored_parameter(own) - wide.detach().double()).abs().max() / wide.detach().abs().max()
        allowed = 2.0**-8 if STRATEGIES[target].parameter_state is None else 2.0**-16
        assert float(error) <= allowed
    if target == "master-weights":
        assert all(
            torch.equal(state["master_parameter"], p)
            for state, p in zip(kept.state.values(), model.parameters(), strict=True)
        )


def test_torchs_own_optimizer_and_back(tmp_path):
    model, optimizer = trained(torchs)
    convert_checkpoint(saved(tmp_path / "torch.pt", model, optimizer), "plus").write(tmp_path / "plus.pt")
    content = converted_to("plain", tmp_path / "plus.pt", tmp_path / "back.pt")
    again = torch.optim.AdamW(network().named_parameters())
    again.load_state_dict(content["optimizer"])
    for state, original in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert state.keys() == original.keys()
        assert all(torch.equal(state[key], original[key]) for key in original)


def test_sgd_without_a_counter(tmp_path):
    model, optimizer = trained(lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    content = converted_to("light", saved(tmp_path / "sgd.pt", model, optimizer), tmp_path / "new.pt")
    loaded = CollageSGD(network().parameters(), strategy="light")
    loaded.load_state_dict(content["optimizer"])
    for state, original in zip(loaded.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(state["momentum_buffer"], original["momentum_buffer"])
        assert state["step"] == 1


def test_a_hugging_face_folder_keeps_its_layout(tmp_path):
    model, optimizer = trained(torchs, dtype=torch.float32)
    folder = hugging_face(tmp_path / "checkpoint-12", model, optimizer)
    convert_checkpoint(folder, "plus").write(tmp_path / "new")
    written, before = ({file.name for file in own.iterdir()} for own in (tmp_path / "new", folder))
    assert written == before
    assert (tmp_path / "new" / "scheduler.pt").read_bytes() == (folder / "scheduler.pt").read_bytes()
    weights: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "new").glob("*.safetensors"):
        weights |= load_file(file)
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values()) == 2 * 2064
    _, kept = resumed(weights, torch.load(tmp_path / "new" / "optimizer.pt"), "plus")
    for own, wide in zip(kept.param_groups[0]["params"], model.parameters(), strict=True):
        torch.testing.assert_close(kept.stored_parameter(own), wide.detach().double(), rtol=2**-16, atol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("flattened", [False, True])
def test_a_distributed_checkpoint_keeps_its_layout(flattened, tmp_path):
    model, optimizer = trained(ours("light"))
    options = views.StateDictOptions(flatten_optimizer_state_dict=flattened)
    states = views.get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optim": states}, checkpoint_id=tmp_path / "old", no_dist=True)
    convert_checkpoint(tmp_path / "old", "plus").write(tmp_path / "new")
    fresh = network()
    target = CollageAdamW(fresh.parameters(), lr=1.0, strategy="plus")
    content = {"model": fresh.state_dict(), "optim": views.get_optimizer_state_dict(fresh, target, options=options)}
    dcp.load(content, checkpoint_id=tmp_path / "new", no_dist=True)
    views.set_optimizer_state_dict(fresh, target, content["optim"], options=options)
    assert_same_state((fresh, target), resumed(model.state_dict(), optimizer.state_dict(), "plus"))
    assert target.param_groups[0]["lr"] == 1e-3


def test_tied_weights_stay_one(tmp_path):
    model = tied_weights()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    model["head"](model["token"](torch.arange(30))).square().sum().backward()
    optimizer.step()
    weights = converted_to("plus", saved(tmp_path / "tied.pt", model, optimizer), tmp_path / "new.pt")["model"]
    assert weights["head.weight"].dtype == torch.bfloat16
    assert weights["head.weight"].data_ptr() == weights["token.weight"].data_ptr()


def test_the_command_says_before_it_writes(tmp_path):
    path = saved(tmp_path / "plain.pt", *trained(ours("plain")))
    arguments = [str(path), "--to", "plus"]
    answer = CliRunner().invoke(convert, arguments)
    assert answer.exit_code == 0, answer.output
    assert "plain to plus, 6 parameters, 2,064 weights" in answer.output
    assert "bytes of weights and states: 12,384 to 20,640, 10 a weight" in answer.output
    assert "lost: nothing, every value is the same" in answer.output
    assert "cannot be had: what rounding has taken from weight so far: it was never kept" in answer.output
    assert answer.output.endswith("nothing was written: pass --output PATH\n")
    assert [file.name for file in tmp_path.iterdir()] == ["plain.pt"]
    answer = CliRunner().invoke(convert, [*arguments, "--output", str(tmp_path / "new.pt")])
    assert answer.output.index("bytes of weights") < answer.output.index("written to")
    assert (tmp_path / "new.pt").exists()
    found = json.loads(CliRunner().invoke(convert, [*arguments, "--json"]).output)
    assert found["gained"][0] == "a residual of weight, which begins at zero"
    assert found["bytes_after"] == 20640


def test_what_cannot_be_converted_is_refused_by_name(tmp_path):
    model, optimizer = trained(ours("plus"))
    path = saved(tmp_path / "plus.pt", model, optimizer)
    answer = CliRunner().invoke(convert, [str(path), "--to", "pluss"])
    assert answer.exit_code == 2
    assert "Invalid strategy: 'pluss'; use one of plain" in answer.output
    with pytest.raises(CheckpointError, match=r"plus\.pt: exists already: remove it, or name another path"):
        convert_checkpoint(path, "light").write(path)
    with pytest.raises(CheckpointError, match="no optimizer state was found"):
        convert_checkpoint(saved(tmp_path / "weights.pt", model), "light")
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match="an object of class Sequential is in it"):
        convert_checkpoint(tmp_path / "whole.pt", "light").write(tmp_path / "new.pt")
    assert not (tmp_path / "new.pt").exists()
    kahan = optimizer.state_dict()
    for state in kahan["state"].values():
        state["kahan_comp"] = state.pop("parameter_low")
    torch.save({"model": model.state_dict(), "optimizer": kahan}, tmp_path / "optimi.pt")
    with pytest.raises(CheckpointError, match="kahan_comp is kept beside the weight by another library"):
        convert_checkpoint(tmp_path / "optimi.pt", "light")
    nameless = hugging_face(tmp_path / "folder", *trained(ours("light")))
    with pytest.raises(CheckpointError, match="nothing says which weight its states belong to"):
        convert_checkpoint(nameless, "plus")
    assert read_checkpoint(path).weights


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3),
        lambda model: torch.optim.Adafactor(model.named_parameters(), lr=1e-3),
        lambda model: bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=16),
    ],
)
def test_states_of_another_shape_or_code_are_refused(make, tmp_path):
    path = saved(tmp_path / "run.pt", *trained(make))
    with pytest.raises(CheckpointError, match="whose form is not converted"):
        convert_checkpoint(path, "split-master")
