"""Reading: every usual form of a checkpoint, and what happens to forms that cannot be read safely."""

import json
import pickle
import sys
import tarfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from collage_agent.audit import CheckpointError, audit_checkpoint, read_checkpoint, render
from collage_agent.audit.checkpoint_parameters import checkpoint_parameters
from collage_optim import CollageAdamW
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from tests.audit.checkpoints import hugging_face, network, saved, tied_weights, trained


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def kept_in(path):
    return checkpoint_parameters(read_checkpoint(path))


def strategies(path):
    return {entry.name: entry.strategy for entry in kept_in(path)[0]}


def assert_holds_the_weights_of(checkpoint, model):
    assert checkpoint.weights.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(checkpoint.weights[name], weight)


def assert_paired(kept, model, optimizer):
    parameters = dict(model.named_parameters())
    assert {entry.name for entry in kept} == parameters.keys()
    for entry in kept:
        assert torch.equal(entry.averages["exp_avg"], optimizer.state[parameters[entry.name]]["exp_avg"])


def test_a_file_of_state_dicts(tmp_path):
    path = saved(tmp_path / "last.pt", *trained(adamw), epoch=3, config={"lr": 1e-3})
    assert strategies(path) == {f"{layer}.{kind}": "plain" for layer in (0, 1, 2) for kind in ("weight", "bias")}
    assert kept_in(path)[1] == []


def test_files_of_an_old_torch_and_of_lightning(tmp_path):
    torch.save(network().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert len(read_checkpoint(tmp_path / "old.pt").weights) == 6
    model, optimizer = trained(adamw)
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 12}
    torch.save(content, tmp_path / "epoch=1.ckpt")
    assert set(strategies(tmp_path / "epoch=1.ckpt").values()) == {"plain"}


def test_a_folder_of_safetensors_shards_and_an_optimizer_file(tmp_path):
    model, optimizer = trained(adamw)
    hugging_face(tmp_path, model, optimizer)
    save_file({"stray": torch.ones(5)}, tmp_path / "adapter.safetensors")
    torch.save(torch.get_rng_state(), tmp_path / "rng_state.pth")
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.files == [*(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)), "optimizer.pt"]
    assert_holds_the_weights_of(checkpoint, model)
    kept, notes = checkpoint_parameters(checkpoint)
    assert {entry.strategy for entry in kept} == {"plain"}
    # safetensors are not in the model's order: which of three tensors of one shape is which is not said.
    names = [entry.name for entry in kept]
    assert [name for name in names if name.startswith("group")] == ["group0.1", "group0.2", "group0.3"]
    assert any("3 of 6 parameters" in note and "safetensors" in note for note in notes)


def test_a_missing_shard_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-7.safetensors"}}))
    with pytest.raises(CheckpointError, match="model-7"):
        read_checkpoint(tmp_path)


class Sneaky:
    def __reduce__(self):
        return (print, ("code ran",))


def test_code_in_a_checkpoint_is_not_run(tmp_path, capsys):
    torch.save({"model": network().state_dict(), "extra": Sneaky()}, tmp_path / "sneaky.pt")
    with pytest.raises(CheckpointError, match="could run code; save state dicts"):
        read_checkpoint(tmp_path / "sneaky.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Sneaky()))
    with pytest.raises(CheckpointError, match=r"bare\.pt"):
        read_checkpoint(tmp_path / "bare.pt")
    assert "code ran" not in capsys.readouterr().out


def test_a_folder_says_which_file_was_not_read(tmp_path):
    saved(tmp_path / "good.pt", *trained(adamw))
    torch.save({"extra": Sneaky()}, tmp_path / "sneaky.pt")
    checkpoint = read_checkpoint(tmp_path)
    assert len(checkpoint.weights) == 6
    assert any("sneaky.pt" in note for note in checkpoint.notes)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"])
@pytest.mark.parametrize("name", ["broken.pt", "broken.safetensors"])
def test_a_broken_file_is_a_sentence(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="broken"):
        read_checkpoint(tmp_path / name)


def test_nothing_there_is_a_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        read_checkpoint(tmp_path / "nowhere.pt")
    with pytest.raises(CheckpointError, match="no model weights and no optimizer state"):
        read_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint(tmp_path):
    model, optimizer = trained(lambda model: CollageAdamW(list(model.named_parameters()), lr=1e-3, strategy="plus"))
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    content = {**states, "args": Namespace(lr=1e-3), "step": 3}
    distributed_checkpoint.save(content, checkpoint_id=tmp_path / "step-3", no_dist=True)
    checkpoint = read_checkpoint(tmp_path / "step-3")
    assert_holds_the_weights_of(checkpoint, model)
    kept, notes = checkpoint_parameters(checkpoint)
    assert notes == []
    for entry in kept:
        assert entry.low is not None
        assert torch.equal(entry.low, optimizer.state[dict(model.named_parameters())[entry.name]]["parameter_low"])
    assert {entry.strategy for entry in kept} == {"plus"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_with_a_flattened_optimizer(tmp_path):
    model, optimizer = trained(adamw)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    distributed_checkpoint.save({"model": model.state_dict(), **flat}, checkpoint_id=tmp_path, no_dist=True)
    kept, notes = kept_in(tmp_path)
    assert notes == []
    assert_paired(kept, model, optimizer)
    assert {entry.group["betas"] for entry in kept} == {(0.9, 0.999)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_code_in_a_distributed_checkpoint_is_not_run(tmp_path, capsys):
    content = {"model": network().state_dict(), "extra": Sneaky()}
    distributed_checkpoint.save(content, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"print.*could run code; save state dicts"):
        read_checkpoint(tmp_path)
    for index, words in (
        (pickle.dumps(Sneaky()), r"builtins\.print.*could run code"),
        (pickle.dumps({"no": "index"}), "is no index of a distributed checkpoint"),
        (b"", "is cut off"),
    ):
        (tmp_path / ".metadata").write_bytes(index)
        with pytest.raises(CheckpointError, match=words):
            read_checkpoint(tmp_path)
    assert "code ran" not in capsys.readouterr().out


class Net(nn.Module):
    """A model of a class that is nobody's but the user's."""

    def __init__(self):
        super().__init__()
        self.inner = network()
        self.activation = nn.functional.gelu
        self.register_buffer("seen", torch.ones(3))

    def __setstate__(self, state):
        sys.stdout.write("code ran")
        super().__setstate__(state)


def test_a_whole_model_is_read_without_its_class(tmp_path, capsys):
    model = Net()
    optimizer = adamw(model)
    content = {"model": model, "optimizer": optimizer.state_dict(), "args": Namespace(lr=1e-3, out=Path("a"))}
    torch.save(content, tmp_path / "whole.pt")
    checkpoint = read_checkpoint(tmp_path / "whole.pt")
    assert_holds_the_weights_of(checkpoint, model)
    assert list(checkpoint.weights) == list(model.state_dict())
    assert len(checkpoint.optimizers) == 1
    assert "code ran" not in capsys.readouterr().out


def test_states_find_their_weights_across_groups_with_and_without_decay(tmp_path):
    def grouped(model):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups: list[dict[str, object]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3)

    model, optimizer = trained(grouped)
    kept, notes = kept_in(saved(tmp_path / "a.pt", model, optimizer))
    assert notes == []
    assert_paired(kept, model, optimizer)


def test_where_order_does_not_tell_it_says_so(tmp_path):
    def scattered(model):
        vectors = [p for p in model.parameters() if p.shape == (40,)]
        others = [p for p in model.parameters() if p.shape != (40,)]
        groups = [{"params": [*others, vectors[2]]}, {"params": vectors[:2]}]
        return torch.optim.AdamW(groups, lr=1e-3)

    kept, notes = kept_in(saved(tmp_path / "a.pt", *trained(scattered)))
    assert sum(not entry.paired for entry in kept) == 3
    assert "3 of 6 parameters" in notes[0]


def test_named_parameters_need_no_order(tmp_path):
    def named(model):
        parameters = list(model.named_parameters())
        return torch.optim.AdamW(parameters[::-1], lr=1e-3)

    model, optimizer = trained(named)
    kept, _ = kept_in(saved(tmp_path / "a.pt", model, optimizer))
    assert [entry.name for entry in kept] == [name for name, _ in model.named_parameters()][::-1]
    assert all(entry.weight is not None for entry in kept)


def test_a_tied_weight_counts_once(tmp_path):
    kept, _ = kept_in(saved(tmp_path / "tied.pt", tied_weights()))
    assert [entry.name for entry in kept] == ["token.weight"]


WRITTEN = Path(__file__).parent / "written"


def unpacked(name, folder):
    with tarfile.open(WRITTEN / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("rounded", [False, True], ids=["healthy", "rounded"])
@pytest.mark.parametrize(
    ("name", "named"), [("zero-0", "DeepSpeed"), ("zero-1", "ZeRO"), ("zero-3", "ZeRO"), ("megatron", "Megatron")]
)
def test_what_other_libraries_write_is_audited_as_what_it_is(tmp_path, name, named, rounded):
    """Said was "97 % of updates lost" beside fp32 master weights, and no problem of ones that were rounded."""
    audit = audit_checkpoint(unpacked(name + "-rounded" * rounded, tmp_path))
    assert [entry.strategy for entry in audit.kept] == ["master-weights"]
    wide = dict.fromkeys(("master weight", "exp_avg", "exp_avg_sq"), "float32")
    assert audit.kept[0].tensors == {"weight": "bfloat16", **wide}
    assert (audit.kept[0].parameters, audit.elements, audit.learning_rate) == (6, 471, 1e-4)
    assert audit.layers[0].name.endswith("0.weight")
    assert [finding.code for finding in audit.findings] == ["master-rounded"] * rounded
    assert audit.total is not None
    assert audit.total.lost_ratio == 0.0
    with pytest.raises(CheckpointError, match=rf"in .*{named}'s layout, read for audits only"):
        read_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flat_tensors_are_cut_where_their_parameters_begin(tmp_path):
    """Both stages took the same steps, and Megatron's writer the same model's without decay in one group."""
    found = {}
    for name in ("zero-1", "zero-3"):
        checkpoint = read_checkpoint(unpacked(name, tmp_path / name), in_part=True)
        found[name] = {entry.name: entry for entry in checkpoint_parameters(checkpoint)[0]}
    for name, one in found["zero-1"].items():
        three = found["zero-3"][name]
        assert one.weight is not None
        assert one.master is not None
        assert three.master is not None
        assert (one.step, three.step, one.group["weight_decay"]) == (20, 20, 0.1 if one.weight.dim() > 1 else 0.0)
        assert torch.equal(one.master.bfloat16(), one.weight)
        for key, own in {"master": one.master, **one.averages}.items():
            other = three.master if key == "master" else three.averages[key]
            assert own.shape == one.weight.shape
            assert torch.allclose(own, other, rtol=0.05, atol=1e-4), (name, key)


def without_a_rank(folder):
    next(folder.glob("*/*_rank_1_*optim_states.pt")).unlink()
    return "parts of the optimizer are missing"


def with_longer_parameters(folder):
    file = next(folder.glob("*/mp_rank_00_model_states.pt"))
    content = torch.load(file)
    content["param_shapes"][0]["0.weight"] = torch.Size((17, 100))
    torch.save(content, file)
    return "its flat tensors end inside 0.weight"


def with_model_parallelism(folder):
    for file in folder.glob("*/*optim_states.pt"):
        file.rename(file.with_name(file.name.replace("mp_rank_00", "mp_rank_01")))
    return "cut by model parallelism"


@pytest.mark.parametrize("spoil", [without_a_rank, with_longer_parameters, with_model_parallelism])
def test_of_a_layout_that_is_not_certain_no_finding_is_made(tmp_path, spoil):
    reason = spoil(unpacked("zero-1", tmp_path))
    audit = audit_checkpoint(tmp_path)
    assert (audit.findings, audit.total, audit.learning_rate, audit.elements) == ([], None, None, 471)
    assert "not understood: the optimizer is saved in DeepSpeed ZeRO's layout" in render(audit)
    assert reason in " ".join(audit.notes)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg", "kept in flat buffers"),
        ("chained_0.optimizer.state.exp_avg.0.weight", "has no weight of its shape"),
    ],
)
def test_states_of_megatron_that_fit_no_weight_are_not_taken_for_weights(tmp_path, name, reason):
    content = {**network().state_dict(), name: torch.zeros(7)}
    distributed_checkpoint.save(content, checkpoint_id=tmp_path, no_dist=True)
    audit = audit_checkpoint(tmp_path)
    assert (audit.findings, audit.elements) == ([], sum(own.numel() for own in network().parameters()))
    assert reason in " ".join(audit.notes)
    assert "in Megatron's layout" in audit.conclusion
