"""What does not come through a resume is known at the first step; a resume that lost nothing is never accused."""

import copy
from functools import partial

import pytest
import pytorch_optimizer
import torch
from collage_agent.handle import watch
from collage_agent.watching import kept_states, resume_check
from collage_optim import CollageAdamW
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.agent.intent.optimizers import ByParameter
from tests.agent.training import adamw, mean_square
from tests.keepers.table import steps
from tests.keepers.ways import BF16, RATES, ways

STEPS = 5


def named(way):
    return f"{way.who}, {way.name}"


class Saved:
    """A training of some steps, and the same built anew, with what was saved put into it.

    form(model, optimizer, model built anew, its optimizer): loads the second with the states of the first.
    """

    def __init__(self, way, dtype, count=STEPS, form=None):
        self.way, self.dtype, self.count = way, dtype, count
        earlier = self._built()
        with torch.compiler.set_stance("force_eager"):
            model, visible, optimizer = earlier
            steps(way, model, visible, optimizer, 0, count)
        self.model, self.visible, self.optimizer = self._built()
        self.model.load_state_dict(earlier[0].state_dict())
        self.visible.load_state_dict(earlier[1].state_dict())
        if callable(form):
            form(earlier[0], earlier[2], self.model, self.optimizer)
        else:
            # As those load who know that torch's own loading casts what stands beside a 16-bit weight.
            for parameter, before in zip(self.model.parameters(), earlier[0].parameters(), strict=True):
                self.optimizer.state[parameter] = earlier[2].state[before]
            for group, before in zip(self.optimizer.param_groups, earlier[2].param_groups, strict=True):
                group.update({key: value for key, value in before.items() if key != "params"})

    def _built(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 256), nn.GELU(), nn.Linear(256, 24)).to(self.way.weights or self.dtype)
        visible = copy.deepcopy(model).to(self.dtype) if self.way.masters else model
        betas = None if "Lion" in self.way.name else (0.9, 0.95)
        return model, visible, self.way.make(model.parameters(), RATES.get(self.dtype, 1e-4), betas)

    def watched(self, more=1, **options):
        """The watch after one step, or `more`."""
        handle = watch(self.model, self.optimizer, every=1, budget=None, first_step=self.count + 1, **options)
        with torch.compiler.set_stance("force_eager"):
            steps(self.way, self.model, self.visible, self.optimizer, self.count, self.count + more)
        self.count += more
        return handle


ALL = [(way, dtype) for way in ways() for dtype in way.dtypes]


@pytest.mark.slow
@pytest.mark.drawn(by=lambda way, dtype, count: (way.who.partition(" ")[0], way.seen, dtype, count))
@pytest.mark.parametrize("count", [1, 2, STEPS, 40])
@pytest.mark.parametrize(("way", "dtype"), ALL, ids=[f"{named(way)}, {str(dtype)[6:]}" for way, dtype in ALL])
def test_a_resume_that_lost_nothing_is_not_accused(way, dtype, count):
    info = Saved(way, dtype, count).watched().info
    assert (info.resume_losses, info.launch_doubts) == ([], [])


LOADS_WELL = [way for way in ways() if way.who in ("ours", "schedulefree") or way.name in ("AdamW", "AdamW, fp32")]


class MadeWhenBuilt(ByParameter):
    """Adam with master weights, made with all states when it is built, as apex, Megatron and DeepSpeed do."""

    def __init__(self, params, count=0, fill=0.0, again=False, **states):
        super().__init__(params, 1e-4)
        self.made = count, fill, again, states
        for parameter in self.param_groups[0]["params"]:
            self.make(parameter)

    def make(self, parameter):
        count, fill, _, states = self.made
        wide = torch.full_like(parameter, fill, dtype=torch.float32)
        own = {name: make(parameter.detach()) for name, make in states.items()}
        counted = {} if count is None else {"step": copy.deepcopy(count)}
        master = {"master": parameter.detach().float().clone()}
        self.state[parameter] = {**counted, **master, "m": wide, "v": wide.clone(), **own}

    def step_one(self, parameter, group):
        if self.made[2] and parameter not in self.state:
            self.make(parameter)  # a clone of the agent's then steps, and shows which state is the master
        state, gradient = self.state[parameter], parameter.grad.float()
        if "step" in state:
            state["step"] += 1
        state["m"].lerp_(gradient, 0.1)
        state["v"].lerp_(gradient.square(), 0.05)
        state["master"].addcdiv_(state["m"], state["v"].sqrt() + 1e-8, value=-1e-4)
        parameter.copy_(state["master"])


class Misnamed(torch.optim.SGD):
    """A group's `step` that never counts, as in pytorch_optimizer's MADGRAD."""

    def __init__(self, params):
        super().__init__(params, lr=1e-2, momentum=0.9)
        self.param_groups[0]["step"] = 0


class Unfilled(torch.optim.Adam):
    """Keeps an average that nothing fills, as SM3 does without momentum."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state.setdefault("unused", torch.zeros_like(state["exp_avg"]))


FRESH = {
    "masters, counted by an integer": MadeWhenBuilt,
    "masters, counted by a tensor": partial(MadeWhenBuilt, count=torch.zeros(())),
    "masters, counted by nothing": partial(MadeWhenBuilt, count=None),
    "one value in all states": partial(MadeWhenBuilt, fill=0.1),
    "masters that a clone shows, and one value": partial(MadeWhenBuilt, count=None, fill=0.1, again=True),
    "a copy of the weights": partial(MadeWhenBuilt, slow=torch.clone),
    "a mask": partial(MadeWhenBuilt, fill=0.1, mask=lambda weight: weight > 0),
    "masters of weights that were loaded over": partial(MadeWhenBuilt, old=lambda weight: weight.float() - 1),
    "Adagrad": torch.optim.Adagrad,
    "Adagrad, begun at 0.1": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "torch's Rprop": torch.optim.Rprop,
    "torch's ASGD": torch.optim.ASGD,
    "torch's NAdam": torch.optim.NAdam,
    "a step that counts nothing": Misnamed,
    "an average that nothing fills": Unfilled,
}


def trained(model, optimizer, count):
    """Gradients are added up, as some do."""
    for _ in range(count):
        mean_square(model, torch.randn(8, model.in_features)).backward()
        optimizer.step()


def begun(make, count=0, dtype=torch.float32, width=64, **options):
    """A layer and its optimizer after so many steps."""
    torch.manual_seed(0)
    model = nn.Linear(width, width, **options).to(dtype)
    optimizer = make(model.parameters())
    trained(model, optimizer, count)
    return model, optimizer


def looked_at(model, optimizer, count=1, **options):
    """A watch that saw the next steps, and is removed."""
    handle = watch(model, optimizer, every=1, budget=None, **options)
    trained(model, optimizer, count)
    handle.remove()
    return handle


def kinds_of(handle):
    return [loss.kind for loss in handle.info.resume_losses]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("make", FRESH.values(), ids=FRESH)
def test_nothing_is_said_of_a_resume_where_nothing_was_loaded(make, before, dtype):
    model, optimizer = begun(make, before, dtype)
    assert kinds_of(looked_at(model, optimizer, 2)) == []


@pytest.mark.parametrize("count", [0, torch.zeros(())])
def test_states_that_are_made_when_built_are_checked_once_they_are_loaded(count):
    model, earlier = begun(partial(MadeWhenBuilt, count=count), 20, BF16)
    optimizer = MadeWhenBuilt(model.parameters(), count)
    for parameter, state in optimizer.state.items():
        for name in ("master", "m", "v"):
            state[name].copy_(earlier.state[parameter][name])
    (loss,) = looked_at(model, optimizer).info.resume_losses
    assert loss.kind == "count"
    assert "though m and v came along" in loss.text


@pytest.mark.parametrize("own", [False, True], ids=["made when built", "ours"])
def test_masters_of_other_weights_are_seen_where_the_step_writes_them(own):
    ours = partial(CollageAdamW, lr=1e-4, strategy="master-weights")
    model, optimizer = begun(ours if own else partial(MadeWhenBuilt, again=True), int(own), BF16)
    loaded = nn.Linear(64, 64).to(BF16)
    model.load_state_dict(loaded.state_dict())
    handle = looked_at(model, optimizer)
    away = float((model.weight - loaded.weight).detach().norm() / loaded.weight.detach().norm())
    if own:
        assert away < 0.05, "ours takes weights that others write"
        assert handle.info.resume_losses == []
        return
    assert away > 1
    (loss,) = handle.info.resume_losses
    assert (loss.kind, loss.lasting) == ("masters", True)
    assert "of weight and bias were not those of the weights" in loss.text
    told = float(loss.text.partition("moved by ")[2].partition(" ")[0])
    assert told == pytest.approx(away, rel=0.02)
    assert handle.judgement().headline == "Old master weights replaced the weights of weight and bias."


class CountsIn(torch.optim.SGD):
    """Makes its counter in the first step, in a dtype of its own."""

    def __init__(self, params, dtype):
        super().__init__(params, lr=1e-2, momentum=0.9)
        self.counts_in = dtype

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state.setdefault("step", torch.zeros((), dtype=self.counts_in)).add_(1)


@pytest.mark.parametrize("asks", [True, False])
def test_a_step_that_moves_nothing_and_is_counted_is_told(asks):
    """Adam's first step is then 0.744 of its length, and was called the second without a word."""
    model, optimizer = begun(adamw, width=24)
    handle = watch(model, optimizer, every=1)
    if asks:
        get_optimizer_state_dict(model, optimizer)
    trained(model, optimizer, 1)
    assert ("a step that moved nothing was counted before this one" in handle.info.intent_reason) == asks
    assert not handle.info.resume_losses


def test_a_counter_that_begins_at_1_has_counted_nothing():
    """The first step was called 2, after "a step that moved nothing was counted before this one"."""
    handle = looked_at(*begun(pytorch_optimizer.Prodigy, width=24))
    assert handle.step == 1
    assert "moved nothing" not in handle.info.intent_reason


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(BF16, 256), (torch.float16, 2048), (torch.uint8, 255), (torch.int16, 32_767), (torch.int32, None)],
)
def test_a_counter_that_will_stop_is_known_in_the_first_step_of_a_training(dtype, most):
    handle = looked_at(*begun(partial(CountsIn, dtype=dtype)))
    expected = [f"the step counter ends at {most:,}"] if most else []
    assert [loss.short for loss in handle.info.resume_losses] == expected
    assert handle.judgement().health in (["steps are off"] if most else ["healthy", "unknown"])


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_an_average_that_one_layer_lost_is_missed(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(scale=1.0):
        (scale * model(torch.arange(200, 264)).square().mean()).backward()
        optimizer.step()

    for _ in range(20):
        step()
    model[1].requires_grad_(False)
    model[2].requires_grad_(True)
    handle = watch(model, optimizer, every=1, budget=None)
    step()
    handle.remove()
    assert handle.info.resume_losses == [], "rows without tokens and a layer set free hold nothing by right"
    model[1].requires_grad_(True)
    optimizer.state[next(model[1].parameters())][name].zero_()
    handle = watch(model, optimizer, every=1, budget=None)
    step()
    (loss,) = handle.info.resume_losses
    assert (loss.kind, loss.short) == ("averages", f"a resume lost {name} of 1.weight")
    assert handle.judgement().health == "steps are off"


def test_a_layer_whose_states_are_missing_beside_others_is_a_doubt():
    """Told was a note beside "healthy": it may have been set free, or not have come through."""
    model, optimizer = begun(adamw, 20)
    del optimizer.state[model.bias]
    handle = looked_at(model, optimizer)
    found = handle.judgement()
    assert (found.health, found.short) == ("unknown", "bias began anew")
    assert "ias took a first step beside layers that had taken 20" in found.headline
    assert str(handle).count("took a first step") == 1
    assert handle.info.resume_losses == []


class CallsAgain(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        return super().step(closure)


@pytest.mark.parametrize("kind", ["averages", "count"])
def test_nor_does_a_closure_that_is_called_again_hide_what_was_lost(kind):
    model, optimizer = begun(partial(CallsAgain, lr=1e-3))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    for state in optimizer.state.values():
        state["exp_avg" if kind == "averages" else "step"].zero_()
    handle = watch(model, optimizer, every=1, budget=None)
    for _ in range(2):
        optimizer.step(closure)
    assert kinds_of(handle) == [kind]


def of_states(change):
    def apply(saved):
        for parameter, state in saved.optimizer.state.items():
            change(saved.way, parameter, state)

    return apply


def emptied(*names):
    def change(_, parameter, state):
        for key, value in state.items():
            if key in names or any(key == f"{name}_low" for name in names):
                value.zero_()

    return of_states(change)


def step_on_empty_averages(saved, first, last):
    states = saved.optimizer.state_dict()
    for state in states["state"].values():
        state["exp_avg"].zero_()
    saved.optimizer.load_state_dict(states)
    steps(saved.way, saved.model, saved.visible, saved.optimizer, first, last)


def counting(value, dtype=torch.float32):
    def apply(saved):
        for state in saved.optimizer.state.values():
            state["step"] = torch.tensor(value, dtype=dtype)
        for group in saved.optimizer.param_groups:
            # The others refuse some of these dtypes.
            group["foreach"] = False

    return apply


completing_gone = of_states(lambda way, parameter, state: state[way.completes].zero_())


def rebuilt(_, parameter, state):
    key = next(key for key in ("master_parameter", "main") if key in state)
    state[key].copy_(parameter.detach())


def found(name):
    return next(way for way in ways() if way.name == name)


LOSSES = [
    *((name, of_states(rebuilt), "masters") for name in ("CollageAdamW, master-weights", "Master")),
    *((f"CollageAdamW, {own}", emptied("parameter_low"), "residuals") for own in ("split-master", "light", "plus")),
    *((name, completing_gone, "residuals") for name in ("Kahan", "Appended")),
    ("AdamW, Kahan", emptied("kahan_comp"), "residuals"),
    ("AdamW, fp32", counting(200, BF16), "counter"),
    *((name, counting(2.0**24), "counter") for name in ("AdamW, fp32", "AdamW")),
    *((name, counting(0), "count") for name in ("AdamW, fp32", "AdamW", "CollageAdamW, plain")),
    *((name, emptied("exp_avg"), "averages") for name in ("AdamW, fp32", "AdamW", "CollageAdamW, full")),
    *((name, emptied("exp_avg_sq"), "averages") for name in ("AdamW, fp32", "AdamW", "CollageAdamW, plus")),
    *((name, emptied("exp_avg", "exp_avg_sq"), "averages") for name in ("AdamW, fp32", "CollageAdamW, light")),
]


@pytest.mark.drawn(by=lambda name, lose, kind: (kind, "Collage" in name))
@pytest.mark.parametrize(("name", "lose", "kind"), LOSSES)
def test_what_is_lost_is_known_at_the_first_step(name, lose, kind):
    saved = Saved(found(name), found(name).dtypes[0], 20)
    lose(saved)
    handle = saved.watched()
    (loss,) = handle.info.resume_losses
    assert (loss.kind, loss.step) == (kind, 21)
    judged = handle.judgement()
    word = "residuals are off" if kind in ("masters", "residuals") else "steps are off"
    assert (word, "resume_losses") in [(finding.health, finding.key) for finding in judged.findings]
    assert judged.health in (word, "losing updates")
    assert loss.text[1:] in judged.text
    assert loss.lasting == (kind == "counter")


@pytest.mark.parametrize(("width", "kinds"), [(4, []), (64, ["masters"])])
def test_masters_of_a_few_weights_may_equal_them_by_chance(width, kinds):
    make = partial(CollageAdamW, lr=1e-3, strategy="master-weights")
    model, optimizer = begun(make, 5, BF16, width, bias=False)
    optimizer.state[model.weight]["master_parameter"].copy_(model.weight.detach())
    assert kinds_of(looked_at(model, optimizer, 3)) == kinds


@pytest.mark.parametrize(("kept_for", "kinds"), [(1, []), (2, ["residuals"])])
def test_residuals_that_have_been_kept_for_two_steps_are_missed(kept_for, kinds):
    """Since a training of ours went over to them, or since a training began."""
    ours, saved = Saved(found("CollageAdamW, light"), BF16, 20), Saved(found("Kahan"), BF16, kept_for)
    emptied("parameter_low")(ours)
    ours.optimizer.param_groups[0]["residuals_from"] = 20 - kept_for
    completing_gone(saved)
    assert [kinds_of(own.watched()) for own in (ours, saved)] == [kinds, kinds]


class LazyMasters(ByParameter):
    """Makes its master weights where it does not find them, and saves them nowhere."""

    def step_one(self, parameter, group):
        state = self.state[parameter]
        average = state.setdefault("average", torch.zeros_like(parameter, dtype=torch.float32))
        if "master" not in state:
            state["master"] = parameter.detach().float().clone()
        average.lerp_(parameter.grad.float(), 0.1)
        state["master"].add_(average.sign(), alpha=-group["lr"])
        parameter.copy_(state["master"])


def test_masters_that_the_checkpoint_lacks_are_seen_where_they_are_made_anew():
    model, optimizer = begun(partial(LazyMasters, lr=2e-6), dtype=BF16)
    for count, first_step in ((5, 1), (1, 6)):
        assert kinds_of(looked_at(model, optimizer, count, first_step=first_step)) == []
    for state in optimizer.state.values():
        del state["master"]
    handle = watch(model, optimizer, every=1, budget=None, first_step=7)
    trained(model, optimizer, 1)
    (loss,) = handle.info.resume_losses
    assert (loss.kind, loss.step) == ("masters", 7)
    assert "(master) was made anew" in loss.text
    trained(model, optimizer, 200)
    assert handle.judgement().health == "healthy", "what was lost once does not make the steps after it bad"


@pytest.mark.slow
def test_what_is_loaded_in_the_middle_is_looked_at_and_a_kind_of_loss_noted_once_as_it_was_first_found():
    saved = Saved(found("AdamW, fp32"), torch.float32, 20)
    handle = saved.watched(3)
    assert handle.info.resume_losses == []
    for step in (23, 24):
        step_on_empty_averages(saved, step, step + 1)
        assert [(loss.kind, loss.step) for loss in handle.info.resume_losses] == [("averages", 24)]


def test_a_step_that_a_loss_scaler_skips_does_not_make_a_counter_stand_still():
    """A fused optimizer is called for it; the first steps of a resume often overflow, until the scale settles."""
    model, optimizer = begun(partial(adamw, fused=True), 3)
    # As torch.amp.GradScaler does where gradients overflowed.
    vars(optimizer).update(grad_scale=torch.ones(()), found_inf=torch.ones(()))
    assert kinds_of(looked_at(model, optimizer)) == []
    assert float(optimizer.state[model.weight]["step"]) == 3.0


def test_of_what_came_through_whole_the_first_tensors_are_read(monkeypatch):
    read = []
    sample = kept_states.sample

    def noted(tensor):
        read.append(tensor)
        return sample(tensor)

    monkeypatch.setattr(resume_check, "sample", noted)
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(8, 8).to(BF16) for _ in range(200)])
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), strategy="master-weights")
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(8, 8).to(BF16)
        optimizer.step()
    handle = watch(model, optimizer, every=1, budget=None)
    optimizer.step()
    assert handle.info.resume_losses == []
    assert len(read) <= 8
