"""Averages of the weights: measured as an fp64 average beside them says, found by what is done with them, and no
training is other for it."""

import copy
import gc
import sys
import types
import weakref
from functools import partial
from typing import Any

import collage_agent as collage
import pytest
import torch
from collage_agent import error_guard
from collage_agent.step.average_meter import AverageMeter
from collage_agent.watching.average_watch import AverageWatch
from collage_agent.watching.watch_texts import average_word
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from collage_monitor.diagnosis import Evidence, judge
from tests.agent.test_no_synchronisation import Listening
from tests.agent.training import adamw, gpt_loss, mlp, mlp_loss, small_gpt, train
from tests.reference.averages import ReferenceAverage, metrics_of

BF16, FP32 = torch.bfloat16, torch.float32
ORIGINAL = AveragedModel.__dict__["update_parameters"]


class EMAModel:
    """A small replica of diffusers' class of this name: shadow parameters, a decay that warms up, `step`."""

    def __init__(self, parameters, decay=0.9999):
        self.shadow_params = [parameter.clone().detach() for parameter in parameters]
        self.decay, self.optimization_step, self.cur_decay_value = decay, 0, None

    @torch.no_grad()
    def step(self, parameters):
        parameters = list(parameters)
        self.optimization_step += 1
        step = max(0, self.optimization_step - 1)
        self.cur_decay_value = 0.0 if step <= 0 else min((1 + step) / (10 + step), self.decay)
        for shadow, parameter in zip(self.shadow_params, parameters, strict=True):
            shadow.sub_((1 - self.cur_decay_value) * (shadow - parameter))


class ModelEma(nn.Module):
    """A small replica of timm's classes: a copy of the model under `module`, `update`."""

    def __init__(self, model, decay=0.99):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model, step=None):
        torch._foreach_lerp_([*self.module.parameters()], [*model.parameters()], 1 - self.get_decay(step))

    def get_decay(self, step=None):
        return self.decay if step is None else min(self.decay, (1 + step) / (10 + step))


def lerp(average, model, decay):
    """The plain loop that people write."""
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs.to(mine.dtype), 1.0 - decay)


def trained(model, steps, update, loss_of=mlp_loss, optimizer=None):
    """Steps, with an update of the average after each of them."""
    optimizer = optimizer or adamw(model.parameters())
    for step in range(steps):
        train(model, optimizer, 1, loss_of, start=step)
        update()


def announced(handles, average, model, by, **said):
    """An update by the plain loop that the handles are told of."""
    for handle in handles:
        handle.before()
    lerp(average, model, by)
    for handle in handles:
        handle.after(**said)


AVERAGED: dict[str, Any] = {
    "AveragedModel, multi": partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "AveragedModel, one by one": partial(AveragedModel, avg_fn=get_ema_avg_fn(0.9)),
    "AveragedModel, SWA": AveragedModel,
    "EMAModel": lambda model: EMAModel(model.parameters(), 0.9),
    "ModelEma": lambda model: ModelEma(model, 0.9),
}


def update_of(average, model):
    if isinstance(average, AveragedModel):
        return lambda: average.update_parameters(model)
    if isinstance(average, EMAModel):
        return lambda: average.step(model.parameters())
    return lambda: average.update(model)


def averaged(kind="AveragedModel, multi", dtype=BF16, **options):
    """A model, its average, what updates that, and a watch of all of it at each update."""
    model = mlp(dtype=dtype)
    average = (AVERAGED[kind] if isinstance(kind, str) else kind)(model)
    handle = collage.watch_average(average, model, **{"every": 1, "sample": "all", **options})
    return model, average, update_of(average, model), handle


def in_fp64(references, average, model, decay, updates):
    """What the reference of each layer says of an update."""
    before = {name: own.detach().clone() for name, own in average.named_parameters()}
    updates()
    weights, after = dict(model.named_parameters()), dict(average.named_parameters())
    return {name: own.update(before[name], after[name], weights[name], decay) for name, own in references.items()}


def assert_told(handle, layers):
    """The summary says what the references say."""
    summary = handle.summary()
    told = [*((summary["layers"][name], [layer]) for name, layer in layers.items())]
    for found, own in [*told, (summary["model"], [*layers.values()])]:
        for key, value in metrics_of(own).items():
            assert found[key] == (value if value is None else pytest.approx(value, rel=1e-9, abs=1e-11)), key


@pytest.mark.drawn
@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize(("width", "seed"), [(70, 0), (33, 1), (128, 2)])
@pytest.mark.parametrize(("dtype", "of"), [(BF16, BF16), (BF16, FP32), (FP32, BF16)])
def test_numbers_are_those_of_an_fp64_average(decay, width, seed, dtype, of):
    model = mlp(seed, of, width)
    average = copy.deepcopy(model).to(dtype)
    handle = collage.watch_average(average, model, decay, every=1, sample="all")
    references = {name: ReferenceAverage(parameter) for name, parameter in average.named_parameters()}
    optimizer = adamw(model.parameters())
    for step in range(12):
        train(model, optimizer, 1, start=step)
        updates = partial(announced, [handle], average, model, decay)
        assert_told(handle, in_fp64(references, average, model, decay, updates))
        assert handle.summary()["updates"] == step + 1


def test_unmeasured_updates_are_carried_along():
    model = mlp()
    average = copy.deepcopy(model)
    handles = [collage.watch_average(average, model, 0.99, every=n, sample="all") for n in (1, 10)]
    trained(model, 29, lambda: announced(handles, average, model, 0.99))
    one, other = (handle.summary()["model"] for handle in handles)
    assert one == other
    assert one["average_updates"] == 29


@pytest.mark.parametrize(
    "decay",
    [pytest.param(0.99, marks=pytest.mark.nightly), 0.999, pytest.param(0.9999, marks=pytest.mark.nightly)],
)
def test_a_bf16_average_that_stands_still_is_told_and_an_fp32_one_is_healthy(decay):
    model = small_gpt(layers=1)
    optimizer = adamw(model.parameters())
    narrow = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    wide = AveragedModel(model, avg_fn=get_ema_avg_fn(decay)).float()
    handles = [collage.watch_average(one, model, every=10, sample="all") for one in (narrow, wide)]

    def update():
        for one in (narrow, wide):
            one.update_parameters(model)

    trained(model, 1, update, gpt_loss, optimizer)
    start = [parameter.detach().clone() for parameter in narrow.module.parameters()]
    trained(model, 200, update, gpt_loss, optimizer)
    told = handles[0].summary()["model"]
    seen = sum(int((a != b).sum()) for a, b in zip(start, narrow.module.parameters(), strict=True))
    assert told["average_moved_ratio"] == pytest.approx(seen / sum(p.numel() for p in start), abs=0.02)
    far, exact = distance(narrow, start), distance(wide, start)
    assert told["average_displacement_ratio"] == pytest.approx(far / exact, abs=0.02)
    assert [wakes(handle) for handle in handles] == [True, False]
    assert "average is off" in str(handles[0])
    assert "loses its updates" in str(handles[0])
    assert "healthy" in str(handles[1])
    assert handles[1].summary()["model"]["average_edq_ratio"] == pytest.approx(1.0, abs=0.01)


def wakes(handle):
    """Whether the on-call is told of what the judgement holds against the average."""
    model = handle.summary()["model"] | {"edq_ratio": 1.0}
    return any(finding.alert == "CollageAverageOff" for finding in judge(Evidence(model)).against)


def distance(average, start):
    squares = (
        (parameter.detach().double() - before.double()).square().sum()
        for parameter, before in zip(average.module.parameters(), start, strict=True)
    )
    return float(sum(squares)) ** 0.5


@pytest.mark.parametrize("kind", AVERAGED)
def test_known_classes_say_their_own_decay(kind):
    model, _, update, handle = averaged(kind, FP32)
    trained(model, 8, update)
    told = handle.summary()["model"]
    assert told["average_edq_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert told["average_drift_ratio"] < 1e-3
    assert told["average_updates"] == (8 if kind == "ModelEma" else 7)
    assert "healthy" in str(handle)


@pytest.mark.parametrize("kind", [kind for kind in AVERAGED if kind.startswith("Averaged")])
def test_an_average_of_the_watched_model_is_found(kind):
    model, twin = mlp(), mlp()
    watched, other = AVERAGED[kind](model), AVERAGED[kind](twin)
    optimizers = adamw(model.parameters()), adamw(twin.parameters())
    handle = collage.watch(model, optimizers[0], every=1, sample="all")
    for step in range(4):
        for one, optimizer, average in zip((model, twin), optimizers, (watched, other), strict=True):
            train(one, optimizer, 1, start=step)
            average.update_parameters(one)
    (found,) = handle.averages
    assert found.reported
    assert found.summary()["updates"] == 3
    assert found.summary()["layers"].keys() == {name for name, _ in model.named_parameters()}
    # What is measured after a step is reported with the next one.
    assert handle.summary()["model"]["average_updates"] == 2
    assert "average of the weights: EDQ" in str(handle)


def test_an_average_is_found_whose_class_was_imported_before_the_watch(monkeypatch):
    module = types.ModuleType("diffusers.training_utils")
    vars(module)["EMAModel"] = EMAModel
    monkeypatch.setitem(sys.modules, "diffusers.training_utils", module)
    model = mlp()
    average = EMAModel(model.parameters(), 0.999)
    optimizer = adamw(model.parameters())
    handle = collage.watch(model, optimizer, every=1, sample="all")
    trained(model, 5, update_of(average, model), optimizer=optimizer)
    (found,) = handle.averages
    assert found.summary()["layers"].keys() == {name for name, _ in model.named_parameters()}
    assert handle.summary()["model"]["average_updates"] == 3


@pytest.mark.parametrize(
    "given", [lambda model: filter(lambda one: one.requires_grad, model.parameters()), nn.Module.parameters]
)
def test_an_iterator_of_parameters_is_left_to_the_call(given):
    model, average = mlp(), EMAModel(mlp().parameters(), 0.9)
    collage.watch_average(EMAModel(model.parameters()), model)  # the class is known, this instance is not
    optimizer = adamw(model.parameters())
    collage.watch(model, optimizer, every=1)
    plain = [parameter.detach().clone() for parameter in mlp().parameters()]
    for step in range(4):
        train(model, optimizer, 1, start=step)
        if step % 2:
            average.step(given(model))
        else:
            average.step(parameters=given(model))
        decay = average.cur_decay_value
        assert decay is not None
        for mine, theirs in zip(plain, model.parameters(), strict=True):
            mine.sub_((1 - decay) * (mine - theirs.detach()))
    assert all(map(torch.equal, average.shadow_params, plain))


def test_one_average_is_reported_and_one_that_is_passed_before_one_that_is_found():
    model = mlp()
    found, passed, second = (AveragedModel(model) for _ in range(3))
    optimizer = adamw(model.parameters())
    watch = collage.watch(model, optimizer, every=1)
    for average in (found, second):
        trained(model, 2, update_of(average, model), optimizer=optimizer)
    (first,) = watch.averages
    handle = collage.watch_average(passed, model)
    assert watch.averages == [handle]
    assert first.removed
    other = collage.watch_average(second, model)
    assert watch.averages == [handle]
    assert "not reported" in str(other)


@pytest.mark.parametrize(("dtype", "decay"), [(BF16, 0.9), (FP32, 0.999)])
def test_however_an_update_is_made_known_the_numbers_are_the_same(dtype, decay):
    """Told by hand, with the decay said each time, of replaced tensors, or seen by the optimizer's step."""
    model = mlp(dtype=dtype)
    told, said, noticed = (copy.deepcopy(model) for _ in range(3))
    replaced = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    by_hand, anew, by_step = (
        collage.watch_average(average, model, decay, every=1, sample="all") for average in (told, replaced, noticed)
    )
    each_time = collage.watch_average(said, model, every=1, sample="all")

    def update():
        announced([by_hand], told, model, decay)
        announced([each_time], said, model, decay, decay=decay)
        lerp(noticed, model, decay)
        anew.before()
        replaced.update({name: parameter.detach().clone() for name, parameter in told.named_parameters()})
        anew.after()

    optimizer = adamw(model.parameters())
    trained(model, 6, update, optimizer=optimizer)
    train(model, optimizer, 1, start=6)
    expected = by_hand.summary()
    assert each_time.summary() == anew.summary() == by_step.summary() == expected
    assert expected["updates"] == 6
    assert expected["model"]["average_moved_ratio"] > 0.1


def test_a_decay_that_was_not_known_once_leaves_the_drift_unknown():
    model = mlp()
    average = copy.deepcopy(model)
    handle = collage.watch_average(average, model, every=1, sample="all")
    told = []
    for decay in (0.9, None, 0.9, 0.9):
        trained(model, 1, lambda decay=decay: announced([handle], average, model, 0.9, decay=decay))
        told.append(handle.summary()["model"])
    assert [one["average_edq_ratio"] is None for one in told] == [False, True, False, False]
    assert [one["average_drift_ratio"] is None for one in told] == [False, True, True, True]


def test_a_decay_that_is_not_known_is_not_guessed_and_a_call_that_fails_is_no_update():
    fails: list[bool] = []

    def mixed(mine, theirs, count):
        if fails:
            raise RuntimeError("out of memory")
        return 0.9 * mine + 0.1 * theirs

    model, _, update, handle = averaged(partial(AveragedModel, avg_fn=mixed))
    trained(model, 4, update)
    told, before = handle.summary()["model"], handle.summary()["updates"]
    assert told["average_edq_ratio"] is None
    assert told["average_drift_ratio"] is None
    assert told["average_moved_ratio"] > 0
    assert "pass decay=" in str(handle)
    fails.append(True)
    with pytest.raises(RuntimeError, match="out of memory"):
        update()
    assert handle.summary()["updates"] == before
    fails.clear()
    update()
    assert handle.summary()["updates"] == before + 1


def test_another_decay_or_sign_than_was_said_is_no_loss():
    model = mlp(dtype=FP32)
    average = copy.deepcopy(model)
    handle = collage.watch_average(average, model, 0.99, every=1, sample="all")

    @torch.no_grad()
    def away():
        handle.before()
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.add_(mine - theirs, alpha=0.01)
        handle.after()

    trained(model, 6, away)
    assert "moves by -1.000 of what its decay says" in str(handle)
    assert wakes(handle)


@pytest.mark.parametrize(
    ("lost", "drift", "word"), [(0.0, 1.0, "healthy"), (0.4, 0.1, "healthy"), (0.8, 1.2, "unknown, updates arrive")]
)
def test_an_average_that_wanders_about_an_exact_one_is_not_called_healthy(lost, drift, word):
    found = {"average_edq_ratio": 1.01, "average_lost_ratio": lost, "average_drift_ratio": drift}
    assert average_word(found).startswith(word)


def test_an_average_that_is_loaded_starts_anew():
    model, average, update, handle = averaged()
    trained(model, 5, update)
    average.load_state_dict({key: value + 1 for key, value in average.state_dict().items()})
    trained(model, 1, update)
    assert handle.summary()["model"]["average_updates"] == 1


@pytest.mark.slow
@pytest.mark.drawn(by=lambda kind: (kind.partition(",")[0],))
@pytest.mark.parametrize("kind", AVERAGED)
def test_training_and_average_are_bit_identical(kind):
    def run(watched):
        model = mlp()
        average, optimizer = AVERAGED[kind](model), adamw(model.parameters())
        if watched:
            collage.watch(model, optimizer, every=2)
            collage.watch_average(average, model, every=2)
        trained(model, 20, update_of(average, model), optimizer=optimizer)
        held = average.shadow_params if isinstance(average, EMAModel) else [*average.state_dict().values()]
        return [*model.parameters()], held, torch.get_rng_state()

    for one, other in zip(run(False), run(True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_update_reads_nothing_back_from_a_device(monkeypatch):
    model, listening = mlp(), Listening()
    average, known = copy.deepcopy(model), AveragedModel(model)
    handles = [collage.watch_average(one, model, 0.99, every=3, sample=64) for one in (average, known)]
    for name in ("_announced", "_updated", "take"):
        original = getattr(AverageWatch, name)

        def listened(*arguments, _original=original):
            with listening:
                return _original(*arguments)

        monkeypatch.setattr(AverageWatch, name, listened)

    def update():
        announced(handles[:1], average, model, 0.99)
        known.update_parameters(model)

    watch = collage.watch(model, optimizer := adamw(model.parameters()), every=1, layers="weight")
    trained(model, 8, update, optimizer=optimizer)
    assert not listening.read
    assert all(handle.summary()["model"]["average_edq_ratio"] is not None for handle in handles)
    assert {name for name, own in watch.summary()["layers"].items() if own["average_updates"]} == {
        name for name, _ in model.named_parameters() if "weight" in name
    }


def test_what_is_removed_measures_no_more_and_classes_have_their_methods_back():
    model = mlp()
    average, optimizer = AveragedModel(model), adamw(model.parameters())
    watch, update = collage.watch(model, optimizer, every=1, sample="all"), update_of(average, model)
    trained(model, 4, update, optimizer=optimizer)
    (found,) = watch.averages
    copied = copy.deepcopy(average)
    assert AveragedModel.__dict__["update_parameters"] is not ORIGINAL
    watch.remove()
    assert found.removed
    numbers = found.summary()
    trained(model, 2, update, optimizer=optimizer)
    assert found.summary() == numbers
    assert AveragedModel.__dict__["update_parameters"] is ORIGINAL
    assert torch.equal(copied.n_averaged + 2, average.n_averaged)


@pytest.mark.slow
def test_an_average_that_the_training_drops_is_not_kept():
    model = mlp()
    average, optimizer = AveragedModel(model), adamw(model.parameters())
    watch = collage.watch(model, optimizer, every=1, sample="all")
    for step in range(4):
        train(model, optimizer, 1, start=step)
        average.update_parameters(model)
    parameter = weakref.ref(next(average.parameters()))
    del average
    gc.collect()
    assert parameter() is None
    assert watch.averages == []


@pytest.mark.parametrize(
    ("average", "error", "words"),
    [
        (3, TypeError, "average=int"),
        ([torch.zeros(3)], ValueError, "1 tensors, the model has 6"),
        ({"else": torch.zeros(3)}, ValueError, "holds no weight of the model"),
        (mlp().to("meta"), ValueError, "holds no weight of the model that can be measured"),
        ({"0.weight": torch.zeros(3)}, ValueError, "average of 0.weight: shape"),
    ],
)
def test_what_is_no_average_is_named(average, error, words):
    with pytest.raises(error, match=words):
        collage.watch_average(average, mlp(), 0.99)
    with pytest.raises(ValueError, match=r"decay=1\.5"):
        collage.watch_average(mlp(), mlp(), 1.5)


def test_an_error_of_the_agents_never_reaches_the_training(monkeypatch):
    error_guard.raise_in_tests(False)
    model, average, update, handle = averaged()
    monkeypatch.setattr(AverageMeter, "update", lambda self, share: 1 / 0)
    trained(model, 6, update)
    assert "switched off" in str(handle)
    assert int(average.n_averaged) == 6
