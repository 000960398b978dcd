"""Each loss in each optimizer is known at the first step of the next launch, and no whole resume is accused.

Losses are planted where a run's launches share a folder. Whole resumes come through pickle, safetensors and torch's
distributed checkpoints; those of several ranks are in tests/parallel/test_resumes.py.
"""

import copy
import io
import json
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from collage_optim import CollageAdamW, CollageLion
from safetensors.torch import load, save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.agent.watching import test_saved_numbers
from tests.agent.watching.test_resume_check import LOADS_WELL, Saved, named
from tests.agent.watching.test_saved_numbers import BF16, Job

FP32 = torch.float32
OPTIMIZERS = {
    "AdamW fp32": (FP32, lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "AdamW bf16": (BF16, lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "SGD momentum": (FP32, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
    "light": (BF16, lambda p: CollageAdamW(p, lr=1e-4, strategy="light")),
    "split-master": (BF16, lambda p: CollageAdamW(p, lr=1e-4, strategy="split-master")),
    "master-weights": (BF16, lambda p: CollageLion(p, lr=1e-4, strategy="master-weights")),
}
NARROWER = {FP32: BF16, BF16: torch.float8_e4m3fn}


def averages(optimizer: Any) -> list[tuple[dict[str, Any], str]]:
    """Each state, and the key of a moving average in it, whose low part goes with it."""
    keys = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    return [(state, key) for state in optimizer.state.values() for key in keys if key in state]


def emptied(state, key):
    for part in (key, f"{key}_low"):
        if part in state:
            state[part].zero_()


def half_emptied(state, key):
    """As where one of two ranks lost its part."""
    emptied({part: value.view(-1)[: -(-value.numel() // 2)] for part, value in state.items() if value.dim()}, key)


def of_averages(change, chosen=slice(None)):
    """A loss of the averages' own: change(state, key)."""

    def apply(model, optimizer):
        for state, key in averages(optimizer)[chosen]:
            change(state, key)

    return apply


def narrowed(values: Any) -> Any:
    return values.to(NARROWER[values.dtype]).to(values.dtype)


def weights_rounded(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for own in model.parameters():
            own.copy_(narrowed(own))


def other_weights(model: Any, optimizer: Any) -> None:
    """The states go on beside weights of a fresh model."""
    for layer in (model[0], model[2]):
        layer.reset_parameters()


def what_completes_gone(model: Any, optimizer: Any) -> None:
    """Residuals, or master weights made anew; where nothing completes the weights, a layer's last gaps."""
    with torch.no_grad():
        for own, state in optimizer.state.items():
            if "parameter_low" in state:
                state["parameter_low"].zero_()
            elif "master_parameter" in state:
                state["master_parameter"].copy_(own)
            else:
                own.view(torch.int16 if own.dtype == BF16 else torch.int32).bitwise_and_(~1)


LOSSES = {
    "first averages": of_averages(lambda state, key: key != "exp_avg_sq" and emptied(state, key)),
    "all averages": of_averages(emptied),
    "averages of a layer": of_averages(emptied, slice(-1, None)),
    "half of the averages": of_averages(half_emptied),
    "averages rounded": of_averages(lambda state, key: state[key].copy_(narrowed(state[key]))),
    "averages scaled, as by a loss scale taken out twice": of_averages(lambda state, key: state[key].mul_(0.5)),
    "averages of another layer": of_averages(
        lambda state, key: state[key].copy_(state[key].flatten().roll(1).view_as(state[key]))
    ),
    "no states": lambda model, optimizer: optimizer.state.clear(),
    "a layer made anew": lambda model, optimizer: model[2].reset_parameters(),
    "weights rounded": weights_rounded,
    "other weights": other_weights,
    "what completes": what_completes_gone,
}
OF_WEIGHTS = ("a layer made anew", "weights rounded", "other weights")


@pytest.fixture(autouse=True)
def _optimizers(monkeypatch):
    monkeypatch.setattr(test_saved_numbers, "KINDS", OPTIMIZERS)


@pytest.mark.drawn
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_loss_is_known_at_the_first_step(optimizer, loss, tmp_path):
    job = Job(tmp_path, optimizer)
    job.launch(0, 6)
    found, _, info = job.launch(6, 7, spoil=LOSSES[loss])
    assert "bit for bit" not in str(found)
    assert found.weights.differing or found.states.differing
    alone = loss == "what completes" and optimizer not in ("light", "split-master", "master-weights")
    assert bool(found.weights.differing) == (alone or loss in OF_WEIGHTS)
    assert bool(found.states.differing) == (not found.weights.differing)
    assert all(lost.step == 7 for lost in info.resume_losses)


def pickled(model: Any, optimizer: Any, other: Any, another: Any, folder: Any) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    another.load_state_dict(torch.load(file, weights_only=False))


def in_safetensors(model: Any, optimizer: Any, other: Any, another: Any, folder: Any) -> None:
    """Tensors by a name of number and key; what is none goes into the header as text."""
    states = optimizer.state_dict()
    named = {f"{number}/{key}": value for number, state in states["state"].items() for key, value in state.items()}
    tensors = {name: value.clone() for name, value in named.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in named.items() if name not in tensors}
    found = {**load(save(tensors)), **json.loads(json.dumps(numbers))}
    again: dict[str, Any] = {"state": {}, "param_groups": copy.deepcopy(states["param_groups"])}
    for name, value in found.items():
        number, _, key = name.partition("/")
        again["state"].setdefault(int(number), {})[key] = value
    another.load_state_dict(again)


def distributed(model: Any, optimizer: Any, other: Any, another: Any, folder: Any) -> None:
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder, no_dist=True)
    request = {"optimizer": get_optimizer_state_dict(other, another)}
    dcp.load(request, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(other, another, request["optimizer"])


NONE: tuple[tuple[str, str], ...] = (("schedulefree", "distributed"), ("bitsandbytes", "safetensors"))
"""torch's own functions refuse the first; the states of the second are nested."""
FORMS: dict[str, Any] = {"pickled": pickled, "safetensors": in_safetensors, "distributed": distributed}
WHOLE = [
    (way, dtype, form)
    for way in LOADS_WELL
    for dtype in way.dtypes
    for form in FORMS
    if (way.who, form) not in NONE
]


@pytest.mark.drawn(by=lambda way, dtype, form, count: (way.who, form, count))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("count", [1, 2, 5, 40])
@pytest.mark.parametrize(
    ("way", "dtype", "form"), WHOLE, ids=[f"{named(way)}, {str(dtype)[6:]}, {form}" for way, dtype, form in WHOLE]
)
def test_what_came_whole_through_a_file_is_not_accused(way, dtype, form, count, tmp_path):
    handle = Saved(way, dtype, count, form=lambda *given: FORMS[form](*given, tmp_path)).watched()
    assert handle.info.resume_losses == []
    assert handle.judgement().health != "residuals are off"
    assert not (handle.summary()["model"].get("residual_dropped_ratio") or 0.0) > 0.01
