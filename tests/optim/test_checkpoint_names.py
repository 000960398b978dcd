"""A distributed checkpoint is found by its weights' names, whatever wraps their modules."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from collage_optim import CollageAdamW, load_distributed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as views


def recomputed(submodule):
    return nn.Sequential(checkpoint_wrapper(submodule))


def part_called_submodule(submodule):
    return nn.ModuleDict({"submodule": submodule, "sub": nn.Linear(4, 4, bias=False)})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("build", "read_as"), [(nn.Sequential, recomputed), (recomputed,) * 2, (part_called_submodule,) * 2]
)
def test_weights_are_found_under_wrappers_and_names_like_theirs(build, read_as, tmp_path):
    model, other = (made(nn.Linear(4, 4)).to(torch.bfloat16) for made in (build, read_as))
    optimizer = CollageAdamW(model.parameters(), lr=2**-9, strategy="plus")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    content = {
        "model": views.get_model_state_dict(model),
        "optim": views.get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(content, checkpoint_id=tmp_path)
    reader = CollageAdamW(other.parameters(), lr=1.0, strategy="plus")
    load_distributed(tmp_path, other, reader)
    assert reader.param_groups[0]["lr"] == 2**-9
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted)
        assert torch.equal(reader.state[found]["exp_avg"], optimizer.state[wanted]["exp_avg"])
