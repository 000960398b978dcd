"""A distributed checkpoint is found by its weights' names, whatever wraps their modules."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from collage_optim import CollageAdamW, load_distributed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as views


def bare(submodule):
    return nn.Sequential(submodule)


def recomputed(submodule):
    return nn.Sequential(checkpoint_wrapper(submodule))


def part_called_submodule(submodule):
    return nn.ModuleDict({"submodule": submodule, "sub": nn.Linear(4, 4, bias=False)})


def model_of(build):
    torch.manual_seed(0)
    return build(nn.Linear(4, 4)).to(torch.bfloat16)


def stepped(model):
    optimizer = CollageAdamW(model.parameters(), lr=2**-9, strategy="plus")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("build", "read_as"), [(bare, recomputed), (recomputed, recomputed), (part_called_submodule,) * 2]
)
def test_weights_are_found_under_wrappers_and_names_like_theirs(build, read_as, tmp_path):
    model = model_of(build)
    optimizer = stepped(model)
    content = {
        "model": views.get_model_state_dict(model),
        "optim": views.get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(content, checkpoint_id=tmp_path)

    other = model_of(read_as)
    reader = CollageAdamW(other.parameters(), lr=1.0, strategy="plus")
    load_distributed(tmp_path, other, reader)

    assert reader.param_groups[0]["lr"] == 2**-9
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted)
        assert torch.equal(reader.state[found]["exp_avg"], optimizer.state[wanted]["exp_avg"])
