"""A launch is told whether it begins with what was saved, or where not and how far; that alone is no illness.

Losses are planted where a run's launches share a folder. Whole resumes come through pickle, safetensors and torch's
distributed checkpoints; those of several ranks are in tests/parallel/test_resumes.py.
"""

import copy
import io
import json
from functools import partial
from typing import Any

import collage_agent as collage
import pytest
import torch
import torch.distributed.checkpoint as dcp
from collage_agent.optim import CollageAdamW, CollageLion
from collage_agent.watching import saved_numbers
from collage_agent.watching.saved_numbers import SavedNumbers
from safetensors.torch import load, save
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.agent.training import adamw, mean_square, train
from tests.agent.watching.test_resume_check import LOADS_WELL, Saved, begun, looked_at, named
from tests.keepers.published import NestedAdamW

pytestmark = pytest.mark.slow

BF16, FP32 = torch.bfloat16, torch.float32
KINDS: dict[str, Any] = {
    "AdamW": (FP32, adamw),
    "AdamW, bf16": (BF16, partial(adamw, foreach=True)),
    "SGD": (FP32, partial(torch.optim.SGD, lr=1e-2, momentum=0.9)),
    "light": (BF16, partial(CollageAdamW, lr=1e-4, strategy="light")),
    "split-master": (BF16, partial(CollageAdamW, lr=1e-4, strategy="split-master")),
    "master-weights": (BF16, partial(CollageAdamW, lr=1e-4, strategy="master-weights")),
    "Lion, master-weights": (BF16, partial(CollageLion, lr=1e-4, strategy="master-weights")),
    "nested": (FP32, lambda p: NestedAdamW(list(p), lr=1e-3)),
}


def built(kind, seed, width):
    torch.manual_seed(seed)
    dtype, make = KINDS[kind]
    model = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, 7)).to(dtype)
    return model, make(model.parameters())


def loss_of(model, step):
    return mean_square(model, torch.randn(8, 12, generator=torch.Generator().manual_seed(step)))


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
        options.setdefault("first_step", start + 1)
        handle = collage.watch(model, optimizer, budget=None, **options)
        done = start
        for stop in (*saves, end):
            train(model, optimizer, stop - done, loss_of, start=done)
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


@pytest.mark.drawn(by=lambda spoil, kind, **_: (spoil, kind))
@pytest.mark.parametrize(
    ("spoil", "weights", "states", "far"),
    [
        (one_bit, ["2.weight"], [], (0.0, 0.01)),
        (scaled, ["0.weight"], [], (0.249, 0.251)),
        (lambda model, own: own.state[model[0].bias]["exp_avg_sq"].mul_(4), [], ["0.bias"], (2.99, 3.01)),
    ],
)
@pytest.mark.parametrize(("kind", "seed"), [("AdamW", 0), ("AdamW", 3), ("AdamW, bf16", 1)])
def test_what_differs_is_named_and_how_far(tmp_path, spoil, weights, states, far, kind, seed):
    job = Job(tmp_path, kind, seed)
    job.launch(0, 6)
    found, _, _ = job.launch(6, 7, spoil=spoil)
    assert sorted(found.weights.layers) == weights
    assert found.states.differing == len(states)
    assert [*found.states.layers] == states
    assert "bit for bit" not in str(found)
    assert far[0] <= found.distance <= far[1]
    assert "step 6" in str(found)


FORGOTTEN = "he resume forgot the optimizer's states"
LOST = [
    (lambda model, own: own.state.clear(), 7, "averages", FORGOTTEN),
    (lambda model, own: own.state.clear(), None, "averages", FORGOTTEN),
    (lambda model, own: own.state.pop(model[2].weight), None, "averages", "he resume lost states of 2.weight"),
    (lambda model, own: own.state[model[2].weight]["step"].fill_(2), None, "count", " resume lost the step count"),
    (lambda model, own: [kept["parameter_low"].zero_() for kept in own.state.values()], None, "residuals", ""),
]


@pytest.mark.parametrize(("spoil", "first_step", "kind", "short"), LOST)
def test_what_did_not_come_back_beside_the_saved_weights_is_a_loss_told_once(
    tmp_path, spoil, first_step, kind, short
):
    """Told was "healthy", and a launch that forgot all states counted again over steps that the run has."""
    job = Job(tmp_path, "split-master" if kind == "residuals" else "AdamW")
    job.launch(0, 6)
    _, found, info = job.launch(6, 8, every=1, spoil=spoil, first_step=first_step, expect="resumed")
    assert [(loss.kind, loss.step) for loss in info.resume_losses] == [(kind, 7)]
    assert (found.first_step, info.steps_before) == (7, 6)
    if kind != "residuals":
        assert found.health == "steps are off"
        assert short in found.headline
        assert [breach.expectation for breach in info.broken] == ["resumed"]


@pytest.mark.parametrize(
    ("kind", "end", "spoil"),
    [("AdamW", 6, None), ("SGD", 6, None), ("AdamW", 1, lambda model, own: own.param_groups[0].update(lr=0.0))],
)
def test_a_launch_from_the_beginning_is_no_resume(tmp_path, kind, end, spoil):
    """Nor after a warm-up that begins at a rate of 0: the weights of step 1 are those of the beginning."""
    job = Job(tmp_path, kind)
    job.launch(0, end, spoil=spoil)
    found, judged, info = job.launch(0, 20, every=1, first_step=None, expect="resumed")
    assert info.steps_before == 0
    if spoil is None:
        assert (found, judged.first_step, info.resume_losses) == (None, 1, [])
        assert [(breach.expectation, breach.step) for breach in info.broken] == [("resumed", 1)]


def test_another_optimizer_from_the_saved_weights_is_no_loss(tmp_path):
    job = Job(tmp_path, "AdamW")
    job.launch(0, 6)
    job.kind, job.saved[6] = "SGD", (job.saved[6][0], built("SGD", 0, 40)[1].state_dict())
    found, judged, info = job.launch(6, 7, first_step=None)
    assert info.steps_before == 6, "it counts none: the weights tell"
    assert found.missing.differing == 8
    assert info.resume_losses == []
    assert judged.health != "steps are off"


@pytest.mark.drawn(by=lambda dtype, rate, **_: (dtype, rate))
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("width", [40, 300])
def test_what_rounding_on_the_way_takes_is_told_against_what_was_moved(tmp_path, dtype, rate, width):
    """Told was "by 0.0005 of its norm", where two thirds of a launch were gone."""
    job = Job(tmp_path, "AdamW", width=width)
    begun, at_end = [], []

    def narrow(model, optimizer):
        optimizer.param_groups[0]["lr"] = rate
        with torch.no_grad():
            for weight in model.parameters():
                at_end.append(weight.clone())
                weight.copy_(weight.to(dtype))
                begun.append(weight.clone())

    job.launch(0, 6, spoil=narrow)
    at_start, begun, at_end = begun, [], []
    _, judged, info = job.launch(6, 7, spoil=narrow)
    moved = [(then - start).double() for then, start in zip(at_end, at_start, strict=True)]
    gone = [(then - now).double() for then, now in zip(at_end, begun, strict=True)]
    along = sum(float((a * b).sum()) for a, b in zip(moved, gone, strict=True))
    share = along / sum(float(a.square().sum()) for a in moved)
    assert info.continuation.cast.differing == 3, "of a bias of 7 numbers nothing is said"
    if share < 0.01:
        assert info.resume_losses == []
        return
    (loss,) = info.resume_losses
    assert ("residuals are off", "resume_losses") in [(own.health, own.key) for own in judged.findings]
    assert f"3 of 4 weights begin as {str(dtype)[6:]} numbers" in loss.text
    told = float(loss.text.rpartition(": ")[2].partition(" %")[0]) / 100
    assert told == pytest.approx(share, abs=0.1)


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


def test_of_many_tensors_fewer_numbers_of_each_are_kept_and_a_file_that_cannot_be_read_is_none(
    tmp_path, monkeypatch
):
    """10,000 layers would else write 80 MB at each checkpoint."""
    monkeypatch.setattr(saved_numbers, "_MOST_NUMBERS", 36)
    Job(tmp_path).launch(0, 3, saves=[3])
    (path,) = tmp_path.rglob("*.msgpack")
    numbers = SavedNumbers(path).at(3)
    assert numbers is not None
    marks = [mark for layer in numbers.values() for mark in layer.values() if mark.place]
    assert {len(mark.numbers) for mark in marks} == {3}, "4 tensors, each with two moments"
    path.write_bytes(b"\x81\x01\xc1")
    assert SavedNumbers(path).at(1) is None


@pytest.mark.parametrize("trained_in", [torch.float32, BF16], ids=["rounded", "widened"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_wide_weights_that_begin_as_16_bit_numbers_beside_wider_averages_are_told(dtype, trained_in):
    """Told was "healthy": master weights that are the parameters were built anew from the model's 16-bit ones.
    Weights that were trained in 16 bits and widened since have averages of 16 bits."""
    make = partial(adamw, eps=1e-4)
    model, optimizer = begun(make, 20, dtype if trained_in is BF16 else trained_in)
    resumed = copy.deepcopy(model).to(dtype).float()
    loaded = make(resumed.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    handles = [looked_at(own, by, 2) for own, by in ((resumed, loaded), (model, optimizer))]
    found = [handle.judgement() for handle in handles]
    told = [f"as a {str(dtype)[6:]} number after 20 steps" in own.text for own in found]
    assert told == [own.short == "weights may have been rounded" for own in found]
    assert told == [trained_in is torch.float32, False]
    assert all(handle.info.resume_losses == [] for handle in handles)


NARROWER = {FP32: BF16, BF16: torch.float8_e4m3fn}


def averages(optimizer):
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


def narrowed(values):
    return values.to(NARROWER[values.dtype]).to(values.dtype)


def weights_rounded(model, optimizer):
    with torch.no_grad():
        for own in model.parameters():
            own.copy_(narrowed(own))


def other_weights(model, optimizer):
    """The states go on beside weights of a fresh model."""
    for layer in (model[0], model[2]):
        layer.reset_parameters()


def what_completes_gone(model, optimizer):
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


@pytest.mark.drawn
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nested"])
def test_each_loss_is_known_at_the_first_step(kind, loss, tmp_path):
    job = Job(tmp_path, kind)
    job.launch(0, 6)
    found, _, info = job.launch(6, 7, spoil=LOSSES[loss])
    assert "bit for bit" not in str(found)
    assert found.weights.differing or found.states.differing
    alone = loss == "what completes" and kind in ("AdamW", "AdamW, bf16", "SGD")
    assert bool(found.weights.differing) == (alone or loss in OF_WEIGHTS)
    assert bool(found.states.differing) == (not found.weights.differing)
    assert all(lost.step == 7 for lost in info.resume_losses)


def pickled(model, optimizer, other, another, folder):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    another.load_state_dict(torch.load(file, weights_only=False))


def in_safetensors(model, optimizer, other, another, folder):
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


def distributed(model, optimizer, other, another, folder):
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
