"""Reading: every usual form of a checkpoint, and what happens to forms that cannot be read safely."""

import json
import pickle

import pytest
import torch
from collage_agent.audit import CheckpointError, read_checkpoint
from collage_agent.audit.kept import kept_parameters
from safetensors.torch import save_file
from torch import nn

from tests.audit.checkpoints import network, saved, trained


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def strategies(path):
    kept, notes = kept_parameters(read_checkpoint(path))
    return {entry.name: entry.strategy for entry in kept}, notes


def test_a_file_of_state_dicts(tmp_path):
    path = saved(tmp_path / "last.pt", *trained(adamw), epoch=3, config={"lr": 1e-3})
    names, notes = strategies(path)
    assert names == {f"{layer}.{kind}": "plain" for layer in (0, 1, 2) for kind in ("weight", "bias")}
    assert notes == []


def test_an_old_torch_file(tmp_path):
    torch.save(network().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert len(read_checkpoint(tmp_path / "old.pt").weights) == 6


def test_a_lightning_checkpoint(tmp_path):
    model, optimizer = trained(adamw)
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 12}
    torch.save(content, tmp_path / "epoch=1.ckpt")
    assert set(strategies(tmp_path / "epoch=1.ckpt")[0].values()) == {"plain"}


def test_a_folder_of_safetensors_shards_and_an_optimizer_file(tmp_path):
    model, optimizer = trained(adamw)
    weights = model.state_dict()
    save_file({name: weights[name] for name in list(weights)[:3]}, tmp_path / "model-1.safetensors")
    save_file({name: weights[name] for name in list(weights)[3:]}, tmp_path / "model-2.safetensors")
    save_file({"stray": torch.ones(5)}, tmp_path / "adapter.safetensors")
    index = {"weight_map": {name: f"model-{1 + (place > 2)}.safetensors" for place, name in enumerate(weights)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(torch.get_rng_state(), tmp_path / "rng_state.pth")
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.files == ["model-1.safetensors", "model-2.safetensors", "optimizer.pt"]
    for name, weight in weights.items():
        assert torch.equal(checkpoint.weights[name], weight)
    assert set(strategies(tmp_path)[0].values()) == {"plain"}


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


def test_a_distributed_checkpoint_says_how_to_convert_it(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match="dcp_to_torch"):
        read_checkpoint(tmp_path)


def test_states_find_their_weights_across_groups_with_and_without_decay(tmp_path):
    def grouped(model):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups: list[dict[str, object]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3)

    model, optimizer = trained(grouped)
    kept, notes = kept_parameters(read_checkpoint(saved(tmp_path / "a.pt", model, optimizer)))
    assert notes == []
    parameters = dict(model.named_parameters())
    for entry in kept:
        state = optimizer.state[parameters[entry.name]]
        assert torch.equal(entry.averages["exp_avg"], state["exp_avg"])


def test_where_order_does_not_tell_it_says_so(tmp_path):
    def scattered(model):
        vectors = [p for p in model.parameters() if p.shape == (40,)]
        others = [p for p in model.parameters() if p.shape != (40,)]
        groups = [{"params": [*others, vectors[2]]}, {"params": vectors[:2]}]
        return torch.optim.AdamW(groups, lr=1e-3)

    kept, notes = kept_parameters(read_checkpoint(saved(tmp_path / "a.pt", *trained(scattered))))
    assert sum(entry.weight is None for entry in kept) == 3
    assert "3 of 6 parameters" in notes[0]


def test_named_parameters_need_no_order(tmp_path):
    def named(model):
        parameters = list(model.named_parameters())
        return torch.optim.AdamW(parameters[::-1], lr=1e-3)

    model, optimizer = trained(named)
    kept, _ = kept_parameters(read_checkpoint(saved(tmp_path / "a.pt", model, optimizer)))
    assert [entry.name for entry in kept] == [name for name, _ in model.named_parameters()][::-1]
    assert all(entry.weight is not None for entry in kept)


def test_a_tied_weight_counts_once(tmp_path):
    model = nn.ModuleDict({"token": nn.Embedding(30, 8), "head": nn.Linear(8, 30, bias=False)})
    model["head"].weight = model["token"].weight
    kept, _ = kept_parameters(read_checkpoint(saved(tmp_path / "tied.pt", model)))
    assert [entry.name for entry in kept] == ["token.weight"]
