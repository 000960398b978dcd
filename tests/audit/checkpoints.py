"""Checkpoints of real, short trainings."""

import json

import torch
from safetensors.torch import save_file
from torch import nn

__all__ = ["hugging_face", "network", "saved", "tied_weights", "trained"]


def network(dtype=torch.bfloat16, seed=0):
    """Two linear layers around a norm: matrices and vectors, some of one shape."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 24)).to(dtype)


def tied_weights():
    model = nn.ModuleDict({"token": nn.Embedding(30, 8), "head": nn.Linear(8, 30, bias=False)})
    model["head"].weight = model["token"].weight
    return model


def trained(make, *, dtype=torch.bfloat16, steps=12, scale=1.0):
    """A model and its optimizer after a few steps."""
    model = network(dtype)
    optimizer = make(model)
    generator = torch.Generator().manual_seed(9)
    for _ in range(steps):
        inputs = torch.randn(16, 24, generator=generator).to(dtype)
        loss = (model(inputs).float() - 1).square().mean() * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, optimizer


def saved(path, model, optimizer=None, **more):
    """The usual file: state dicts under `model` and `optimizer`."""
    content = {"model": model.state_dict(), **more}
    if optimizer is not None:
        content["optimizer"] = optimizer.state_dict()
    torch.save(content, path)
    return path


def hugging_face(folder, model, optimizer, change=None):
    """What Trainer leaves: safetensors in shards, in no order of the model's, and states in a torch file.

    change: what damages the weights before they are saved.
    """
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.clone() for name, tensor in sorted(model.state_dict().items())}
    if change is not None:
        change(tensors)
    files = {name: f"model-0000{1 + (place > 2)}-of-00002.safetensors" for place, name in enumerate(tensors)}
    for file in set(files.values()):
        own = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_lr": [1e-3]}, folder / "scheduler.pt")
    return folder
