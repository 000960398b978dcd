"""Averages of the weights: measured as an fp64 average beside them says, found by what is done with them, and no
training is other for it."""

from __future__ import annotations

import copy
import gc
import sys
import types
import weakref

import collage_agent as collage
import pytest
import torch
from collage_agent import error_guard
from collage_agent.session import _SESSION
from collage_agent.step.average_meter import AverageMeter
from collage_agent.watching.average_watch import AverageWatch
from collage_agent.watching.watch_texts import average_word
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from collage_monitor.diagnosis import Evidence, judge
from tests.agent.test_no_synchronisation import Listening
from tests.agent.training import gpt_loss, mlp, mlp_loss, small_gpt, train
from tests.reference.averages import ReferenceAverage, metrics_of

BF16, FP32 = torch.bfloat16, torch.float32
ORIGINAL = AveragedModel.__dict__["update_parameters"]


@pytest.fixture(autouse=True)
def _no_watch_waits():
    yield
    _SESSION.waiting.clear()


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


def adamw(model, lr=1e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def trained(model, optimizer, steps, update, loss_of=mlp_loss):
    for step in range(steps):
        train(model, optimizer, 1, loss_of, start=step)
        update()


@pytest.mark.drawn
@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize(("width", "seed"), [(70, 0), (33, 1), (128, 2)])
@pytest.mark.parametrize(("dtype", "of"), [(BF16, BF16), (BF16, FP32), (FP32, BF16)])
def test_numbers_are_those_of_an_fp64_average(decay, width, seed, dtype, of):
    model = mlp(seed, of, width)
    average = copy.deepcopy(model).to(dtype)
    handle = collage.watch_average(average, model, decay, every=1, sample="all")
    references = {name: ReferenceAverage(parameter) for name, parameter in average.named_parameters()}
    optimizer = adamw(model)
    for step in range(12):
        train(model, optimizer, 1, start=step)
        before = {name: parameter.detach().clone() for name, parameter in average.named_parameters()}
        handle.before()
        lerp(average, model, decay)
        handle.after()
        weights, after = dict(model.named_parameters()), dict(average.named_parameters())
        found = {
            name: reference.update(before[name], after[name], weights[name], decay)
            for name, reference in references.items()
        }
        summary = handle.summary()
        assert summary["updates"] == step + 1
        for name, layer in found.items():
            check(summary["layers"][name], metrics_of([layer]))
        check(summary["model"], metrics_of([*found.values()]))


def check(found, expected):
    for key, value in expected.items():
        assert found[key] == (value if value is None else pytest.approx(value, rel=1e-9, abs=1e-11)), key


def test_unmeasured_updates_are_carried_along():
    model = mlp()
    average = copy.deepcopy(model)
    (every, tenth) = (collage.watch_average(average, model, 0.99, every=n, sample="all") for n in (1, 10))
    optimizer = adamw(model)
    for step in range(29):
        train(model, optimizer, 1, start=step)
        for handle in (every, tenth):
            handle.before()
        lerp(average, model, 0.99)
        for handle in (every, tenth):
            handle.after()
    one, other = every.summary()["model"], tenth.summary()["model"]
    assert one == other
    assert one["average_updates"] == 29


@pytest.mark.parametrize(
    "decay",
    [pytest.param(0.99, marks=pytest.mark.nightly), 0.999, pytest.param(0.9999, marks=pytest.mark.nightly)],
)
def test_a_bf16_average_that_stands_still_is_told_and_an_fp32_one_is_healthy(decay):
    model = small_gpt(layers=1)
    optimizer = adamw(model)
    narrow = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    wide = AveragedModel(model, avg_fn=get_ema_avg_fn(decay)).float()
    handles = [collage.watch_average(one, model, every=10, sample="all") for one in (narrow, wide)]

    def update():
        for one in (narrow, wide):
            one.update_parameters(model)

    trained(model, optimizer, 1, update, gpt_loss)
    start = [parameter.detach().clone() for parameter in narrow.module.parameters()]
    trained(model, optimizer, 200, update, gpt_loss)
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


def averaged_models():
    return {
        "AveragedModel, multi": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "AveragedModel, one by one": lambda model: AveragedModel(model, avg_fn=get_ema_avg_fn(0.9)),
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


@pytest.mark.parametrize("kind", averaged_models())
def test_known_classes_say_their_own_decay(kind):
    model = mlp(dtype=FP32)
    average = averaged_models()[kind](model)
    handle = collage.watch_average(average, model, every=1, sample="all")
    trained(model, adamw(model), 8, update_of(average, model))
    told = handle.summary()["model"]
    assert told["average_edq_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert told["average_drift_ratio"] < 1e-3
    assert told["average_updates"] == (8 if kind == "ModelEma" else 7)
    assert "healthy" in str(handle)


@pytest.mark.parametrize("kind", [kind for kind in averaged_models() if kind.startswith("Averaged")])
def test_an_average_of_the_watched_model_is_found(kind):
    model, twin = mlp(), mlp()
    watched, other = averaged_models()[kind](model), averaged_models()[kind](twin)
    optimizers = adamw(model), adamw(twin)
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
    optimizer = adamw(model)
    handle = collage.watch(model, optimizer, every=1, sample="all")
    trained(model, optimizer, 5, lambda: average.step(model.parameters()))
    (found,) = handle.averages
    assert found.summary()["layers"].keys() == {name for name, _ in model.named_parameters()}
    assert handle.summary()["model"]["average_updates"] == 3


@pytest.mark.parametrize(
    "given", [lambda model: filter(lambda one: one.requires_grad, model.parameters()), nn.Module.parameters]
)
def test_an_iterator_of_parameters_is_left_to_the_call(given):
    model, average = mlp(), EMAModel(mlp().parameters(), 0.9)
    collage.watch_average(EMAModel(model.parameters()), model)  # the class is known, this instance is not
    optimizer = adamw(model)
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
    optimizer = adamw(model)
    watch = collage.watch(model, optimizer, every=1)
    for step in range(2):
        train(model, optimizer, 1, start=step)
        found.update_parameters(model)
        second.update_parameters(model)
    (first,) = watch.averages
    handle = collage.watch_average(passed, model)
    assert watch.averages == [handle]
    assert first.removed
    other = collage.watch_average(second, model)
    assert watch.averages == [handle]
    assert "not reported" in str(other)


def test_a_plain_loop_is_noticed_when_the_optimizer_steps():
    model = mlp()
    average = copy.deepcopy(model)
    by_hand = copy.deepcopy(model)
    noticed = collage.watch_average(average, model, 0.99, every=1, sample="all")
    told = collage.watch_average(by_hand, model, 0.99, every=1, sample="all")
    optimizer = adamw(model)

    def update():
        lerp(average, model, 0.99)
        told.before()
        lerp(by_hand, model, 0.99)
        told.after()

    trained(model, optimizer, 9, update)
    train(model, optimizer, 1, start=9)
    assert noticed.summary() == told.summary()
    assert noticed.summary()["updates"] == 9


@pytest.mark.parametrize("decay", [0.9, 0.999])
def test_a_decay_that_is_said_at_each_update_is_that_of_the_average(decay):
    model = mlp(dtype=FP32)
    average = copy.deepcopy(model)
    known, said = (collage.watch_average(average, model, own, every=1, sample="all") for own in (decay, None))

    def update():
        known.before()
        said.before()
        lerp(average, model, decay)
        known.after()
        said.after(decay=decay)

    trained(model, adamw(model), 6, update)
    assert said.summary() == known.summary()
    assert known.summary()["model"]["average_edq_ratio"] == pytest.approx(1, abs=0.02)


def test_tensors_that_are_replaced_at_each_update_are_followed():
    model = mlp()
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    in_place = [parameter.detach().clone() for parameter in model.parameters()]
    one = collage.watch_average(average, model, 0.9, every=1, sample="all")
    other = collage.watch_average(in_place, model, 0.9, every=1, sample="all")

    def update():
        one.before()
        other.before()
        for mine, (name, parameter) in zip(in_place, model.named_parameters(), strict=True):
            mine.lerp_(parameter.detach(), 0.1)
            average[name] = mine.clone()
        one.after()
        other.after()

    trained(model, adamw(model), 6, update)
    assert one.summary() == other.summary()
    assert one.summary()["model"]["average_moved_ratio"] > 0.5


def test_a_decay_that_is_not_known_is_not_guessed():
    model = mlp()
    average = AveragedModel(model, avg_fn=lambda mine, theirs, count: 0.9 * mine + 0.1 * theirs)
    handle = collage.watch_average(average, model, every=1, sample="all")
    trained(model, adamw(model), 4, lambda: average.update_parameters(model))
    told = handle.summary()["model"]
    assert told["average_edq_ratio"] is None
    assert told["average_drift_ratio"] is None
    assert told["average_moved_ratio"] > 0
    assert "pass decay=" in str(handle)


def test_a_decay_that_was_not_known_once_leaves_the_drift_unknown():
    model = mlp()
    average = copy.deepcopy(model)
    handle = collage.watch_average(average, model, every=1, sample="all")
    told = []
    for step in range(4):
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 1, start=step)
        handle.before()
        lerp(average, model, 0.9)
        handle.after(decay=0.9 if step != 1 else None)
        told.append(handle.summary()["model"])
    assert [one["average_edq_ratio"] is None for one in told] == [False, True, False, False]
    assert [one["average_drift_ratio"] is None for one in told] == [False, True, True, True]


def test_a_call_that_fails_is_no_update():
    fails: list[bool] = []

    def mixed(mine, theirs, count):
        if fails:
            raise RuntimeError("out of memory")
        return 0.9 * mine + 0.1 * theirs

    model = mlp()
    average = AveragedModel(model, avg_fn=mixed)
    handle = collage.watch_average(average, model, every=1, sample="all")
    trained(model, adamw(model), 4, lambda: average.update_parameters(model))
    before = handle.summary()["updates"]
    fails.append(True)
    with pytest.raises(RuntimeError, match="out of memory"):
        average.update_parameters(model)
    assert handle.summary()["updates"] == before
    fails.clear()
    average.update_parameters(model)
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

    trained(model, adamw(model), 6, away)
    assert "moves by -1.000 of what its decay says" in str(handle)
    assert wakes(handle)


@pytest.mark.parametrize(
    ("lost", "drift", "word"), [(0.0, 1.0, "healthy"), (0.4, 0.1, "healthy"), (0.8, 1.2, "unknown, updates arrive")]
)
def test_an_average_that_wanders_about_an_exact_one_is_not_called_healthy(lost, drift, word):
    found = {"average_edq_ratio": 1.01, "average_lost_ratio": lost, "average_drift_ratio": drift}
    assert average_word(found).startswith(word)


def test_an_average_that_is_loaded_starts_anew():
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    handle = collage.watch_average(average, model, every=1, sample="all")
    optimizer = adamw(model)
    trained(model, optimizer, 5, lambda: average.update_parameters(model))
    average.load_state_dict({key: value + 1 for key, value in average.state_dict().items()})
    trained(model, optimizer, 1, lambda: average.update_parameters(model))
    assert handle.summary()["model"]["average_updates"] == 1


@pytest.mark.drawn(by=lambda kind: (kind.partition(",")[0],))
@pytest.mark.parametrize("kind", averaged_models())
def test_training_and_average_are_bit_identical(kind):
    def run(watched):
        model = mlp()
        average, optimizer = averaged_models()[kind](model), adamw(model)
        if watched:
            collage.watch(model, optimizer, every=2)
            collage.watch_average(average, model, every=2)
        trained(model, optimizer, 20, update_of(average, model))
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
        handles[0].before()
        lerp(average, model, 0.99)
        handles[0].after()
        known.update_parameters(model)

    watch = collage.watch(model, optimizer := adamw(model), every=1, layers="weight")
    trained(model, optimizer, 8, update)
    assert not listening.read
    assert all(handle.summary()["model"]["average_edq_ratio"] is not None for handle in handles)
    assert {name for name, own in watch.summary()["layers"].items() if own["average_updates"]} == {
        name for name, _ in model.named_parameters() if "weight" in name
    }


def test_what_is_removed_measures_no_more_and_classes_have_their_methods_back():
    model = mlp()
    average, optimizer = averaged_models()["AveragedModel, multi"](model), adamw(model)
    watch = collage.watch(model, optimizer, every=1, sample="all")
    trained(model, optimizer, 4, lambda: average.update_parameters(model))
    (found,) = watch.averages
    copied = copy.deepcopy(average)
    assert AveragedModel.__dict__["update_parameters"] is not ORIGINAL
    watch.remove()
    assert found.removed
    numbers = found.summary()
    trained(model, optimizer, 2, lambda: average.update_parameters(model))
    assert found.summary() == numbers
    assert AveragedModel.__dict__["update_parameters"] is ORIGINAL
    assert torch.equal(copied.n_averaged + 2, average.n_averaged)


def test_an_average_that_the_training_drops_is_not_kept():
    model = mlp()
    average, optimizer = averaged_models()["AveragedModel, multi"](model), adamw(model)
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
    model = mlp()
    average, optimizer = averaged_models()["AveragedModel, multi"](model), adamw(model)
    handle = collage.watch_average(average, model, every=1)
    monkeypatch.setattr(AverageMeter, "update", lambda self, share: 1 / 0)
    trained(model, optimizer, 6, lambda: average.update_parameters(model))
    assert "switched off" in str(handle)
    assert int(average.n_averaged) == 6
