"""A launch is told whether it begins with what was saved, or where not and how far; that alone is no illness."""

from __future__ import annotations

import copy

import collage_agent as collage
import pytest
import torch
from collage_agent.optim import CollageAdamW
from collage_agent.watching import saved_numbers
from collage_agent.watching.saved_numbers import SavedNumbers
from torch import nn

from tests.keepers.published import NestedAdamW

BF16 = torch.bfloat16
KINDS = {
    "AdamW": (torch.float32, lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "AdamW, bf16": (BF16, lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True)),
    "SGD": (torch.float32, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
    "split-master": (BF16, lambda p: CollageAdamW(p, lr=1e-4, strategy="split-master")),
    "master-weights": (BF16, lambda p: CollageAdamW(p, lr=1e-4, strategy="master-weights")),
    "nested": (torch.float32, lambda p: NestedAdamW(list(p), lr=1e-3)),
}


def built(kind, seed, width):
    torch.manual_seed(seed)
    dtype, make = KINDS[kind]
    model = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, 7)).to(dtype)
    return model, make(model.parameters())


def train(model, optimizer, start, end):
    for step in range(start, end):
        inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        model(inputs.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Job:
    """Launches of one run in one folder; every launch trains some steps and saves."""

    def __init__(self, folder, kind="AdamW", seed=0, width=40):
        self.folder, self.kind, self.seed, self.width = folder, kind, seed, width
        self.saved = {}

    def launch(self, start, end, saves=(), spoil=None, run="r", **options):
        model, optimizer = built(self.kind, self.seed, self.width)
        if start:
            weights, states = copy.deepcopy(self.saved[start])
            model.load_state_dict(weights)
            optimizer.load_state_dict(states)
        if spoil is not None:
            spoil(model, optimizer)
        collage.init("saved", run_id=run, mode="offline", dir=self.folder)
        # SGD counts no steps: its training says which is next, as docs/reference/watch-options.md asks it to.
        handle = collage.watch(model, optimizer, budget=None, first_step=start + 1, **options)
        done = start
        for stop in (*saves, end):
            train(model, optimizer, done, stop)
            done = stop
            self.saved[stop] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        info, found = handle.info, handle.judgement()
        collage.finish()
        return info.continuation, found, info


@pytest.mark.drawn
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seed", "width", "every"), [(0, 40, 1), (1, 300, 10)])
def test_what_came_back_bit_for_bit_is_said_so(tmp_path, kind, seed, width, every):
    job = Job(tmp_path, kind, seed, width)
    first, *_ = job.launch(0, 14, saves=(5, 11), every=every)
    assert first is None
    for start in (14, 5, 11):
        found, _, info = job.launch(start, start + 1, every=every)
        assert (found is None) == (start == 11), "what follows the step gone on from is forgotten"
        if found is not None:
            assert found.step == start
            assert found.weights.tensors == 4
            assert found.states.tensors >= (4 if kind == "SGD" else 8)
            assert found.weights.differing == found.states.differing == 0
            assert "bit for bit" in str(found)
        assert info.resume_losses == []


def one_bit(model, optimizer):
    with torch.no_grad():
        weight = model[2].weight
        weight.view(torch.int16 if weight.dtype == BF16 else torch.int32)[0, 0] ^= 1


def scaled(model, optimizer):
    with torch.no_grad():
        model[0].weight.mul_(1.25)


def other_moment(model, optimizer):
    optimizer.state[model[0].bias]["exp_avg_sq"].mul_(4)


def rounded_states(model, optimizer):
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(BF16).to(state[key].dtype)


def gone(model, optimizer):
    for state in optimizer.state.values():
        del state["exp_avg"]
        state["exp_avg"] = torch.zeros_like(state["exp_avg_sq"])


@pytest.mark.drawn(by=lambda spoil, kind, **_: (spoil, kind))
@pytest.mark.parametrize(
    ("spoil", "weights", "states", "far"),
    [
        (one_bit, ["2.weight"], [], (0.0, 0.01)),
        (scaled, ["0.weight"], [], (0.249, 0.251)),
        (other_moment, [], ["0.bias"], (2.99, 3.01)),
        (rounded_states, [], ["0.bias", "0.weight", "2.bias", "2.weight"], (1e-5, 4e-3)),
        (gone, [], ["0.bias", "0.weight", "2.bias", "2.weight"], (0.99, 1.01)),
    ],
)
@pytest.mark.parametrize(("kind", "seed"), [("AdamW", 0), ("AdamW", 3), ("AdamW, bf16", 1)])
def test_what_differs_is_named_and_how_far(tmp_path, spoil, weights, states, far, kind, seed):
    if spoil is rounded_states and kind != "AdamW":
        states, far = [], (0.0, 0.0)
    job = Job(tmp_path, kind, seed)
    job.launch(0, 6)
    found, _, _ = job.launch(6, 7, spoil=spoil)
    assert sorted(found.weights.layers) == weights
    each = 2 if spoil is rounded_states else 1
    assert found.states.differing == each * len(states)
    assert set(found.states.layers) <= set(states)
    assert ("bit for bit" in str(found)) == (not weights and not states)
    assert far[0] <= found.distance <= far[1]
    assert "step 6" in str(found)


@pytest.mark.parametrize("spoil", [one_bit, pytest.param(scaled, marks=pytest.mark.nightly)])
def test_a_change_on_purpose_is_no_illness(tmp_path, spoil):
    job = Job(tmp_path, "AdamW")
    job.launch(0, 20, every=1)
    found, judgement, info = job.launch(20, 50, every=1, spoil=spoil)
    assert found.weights.differing == 1
    assert judgement.health == "healthy", judgement.text
    assert info.resume_losses == []


def test_nothing_is_said_of_what_cannot_be_compared(tmp_path):
    job = Job(tmp_path)
    job.launch(0, 6)
    assert job.launch(6, 7, run="another")[0] is None
    assert job.launch(0, 3)[0] is None  # a run begun anew
    job.width = 48
    assert job.launch(0, 6, run="wide")[0] is None
    narrow = Job(tmp_path)
    narrow.launch(0, 6, run="wide")
    job.launch(0, 6, run="other")
    found = job.launch(6, 7, run="wide")[0]
    assert found is not None, "biases of one length are comparable"
    assert found.weights.tensors == 1


def test_a_file_that_cannot_be_read_is_none(tmp_path):
    path = tmp_path / "0.msgpack"
    path.write_bytes(b"\x81\x01\xc1")
    assert SavedNumbers(path).at(1) is None


def test_of_many_tensors_fewer_numbers_of_each_are_kept(tmp_path, monkeypatch):
    """10,000 layers would else write 80 MB at each checkpoint."""
    monkeypatch.setattr(saved_numbers, "_MOST_NUMBERS", 36)
    Job(tmp_path).launch(0, 3, saves=[3])
    (path,) = tmp_path.rglob("*.msgpack")
    numbers = SavedNumbers(path).at(3)
    assert numbers is not None
    marks = [mark for layer in numbers.values() for mark in layer.values()]
    assert {len(mark.numbers) for mark in marks} == {3}, "4 tensors, each with two moments"
