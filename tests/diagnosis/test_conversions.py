"""A conversion is no illness, nor is a residual of 0 that no step has moved yet. One that was dropped is, and is
found in the first step."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from collage_agent.audit.checkpoint_audit import audit_checkpoint
from collage_agent.handle import watch
from collage_optim import CollageAdam, CollageAdamW, CollageLion, CollageSGD
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

STEPS = 12


def network(dtype=torch.bfloat16):
    torch.manual_seed(61)
    return nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 8)).to(dtype)


def train(model, optimizer, steps, start=0, schedule=None):
    dtype = next(model.parameters()).dtype
    for step in range(start, start + steps):
        inputs = torch.randn(32, 24, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(inputs.to(dtype)).float() - inputs[:, :8]).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


RULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (CollageAdamW, torch.optim.AdamW, {"lr": 3e-4, "betas": (0.9, 0.95)}),
    "SGD": (CollageSGD, torch.optim.SGD, {"lr": 3e-3, "momentum": 0.9}),
    "Lion": (CollageLion, None, {"lr": 1e-4}),
    "Adam": (CollageAdam, torch.optim.Adam, {"lr": 3e-4, "betas": (0.9, 0.95)}),
}
SOURCES = {
    "torch's": (None, torch.bfloat16),
    "torch's in fp32": (None, torch.float32),
    **{
        name: (name, torch.bfloat16)
        for name in ("plain", "stochastic", "fp32-states", "kahan", "light", "master-weights")
    },
}
TARGETS = ("light", "plus", "kahan", "split-master", "split-master-8bit")
ALL = [
    (rule, source, target)
    for rule, source, target in product(("AdamW", "SGD", "Lion"), SOURCES, TARGETS)
    if not (rule != "AdamW" and target == "plus") and not (rule == "Lion" and source.startswith("torch"))
]


def of_source(rule, source):
    ours, torchs, options = RULES[rule]
    strategy, dtype = SOURCES.get(source, (source, torch.bfloat16))
    model = network(dtype)
    build = torchs if strategy is None else lambda *given, **also: ours(*given, strategy=strategy, **also)
    return model, build(model.parameters(), **options)


def resumed(rule, target, model, states):
    ours, _, options = RULES[rule]
    new = network()
    new.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()})
    optimizer = ours(new.parameters(), strategy=target, **options)
    optimizer.load_state_dict(copy.deepcopy(states))
    return new, optimizer


def fires(judgement):
    """Whether what the judgement holds against the run is the alert."""
    return any(finding.alert == "CollageResidualsOff" for finding in judgement.against)


def no_word(handle):
    judgement = handle.judgement()
    said = [finding.text for finding in judgement.findings if finding.key.startswith("residual")]
    assert judgement.health != "residuals are off"
    assert not [text for text in said if "0 again" in text or "are 0 before" in text]
    assert not fires(judgement)


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize(("rule", "source", "target"), ALL)
def test_a_conversion_drops_nothing(rule, source, target, tmp_path):
    model, optimizer = of_source(rule, source)
    train(model, optimizer, 4)
    model, optimizer = resumed(rule, target, model, optimizer.state_dict())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "now.pt")
    assert "problem" not in {finding.severity for finding in audit_checkpoint(tmp_path / "now.pt").findings}
    handle = watch(model, optimizer, every=3, sample="all", budget=None, casts=())
    train(model, optimizer, 1, start=4)
    assert handle.summary()["step"] is not None
    no_word(handle)
    train(model, optimizer, STEPS, start=5)
    no_word(handle)


@pytest.mark.drawn(by=lambda strategy, every: (strategy in ("light", "plus", "full"), every))
@pytest.mark.parametrize("every", [1, 2, 10])
@pytest.mark.parametrize("strategy", ["light", "plus", "kahan", "split-master", "full"])
def test_a_warm_up_from_a_rate_of_0_drops_nothing(strategy, every):
    model = network()
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), strategy=strategy)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, step - 2) / 20)
    handle = watch(model, optimizer, every=every, sample="all", budget=None)
    for step in range(14):
        train(model, optimizer, 1, start=step, schedule=schedule)
        no_word(handle)
        # Where nothing was intended no word is possible; a rate that is next to 0 moves no visible weight.
        assert handle.judgement().health in ("healthy", "unknown")


@pytest.mark.parametrize("stops_at", [1, 3, 5])
def test_a_checkpoint_of_a_warm_up_from_a_rate_of_0_drops_nothing(stops_at, tmp_path):
    """At step 3 no step has moved a weight, and the next one does."""
    model = network()
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), strategy="light")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, step - 2) / 20)
    train(model, optimizer, stops_at, schedule=schedule)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "now.pt")
    assert "problem" not in {finding.severity for finding in audit_checkpoint(tmp_path / "now.pt").findings}
    model, optimizer = resumed("AdamW", "light", model, optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 1e-3
    handle = watch(model, optimizer, every=1, sample="all", budget=None)
    for step in range(stops_at, stops_at + 3):
        train(model, optimizer, 1, start=step)
        no_word(handle)


def test_a_layer_set_free_by_its_rate_and_a_group_added_drop_nothing():
    model = network()
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters()), "lr": 0.0},
        {"params": list(model[1].parameters())},
    ]
    optimizer = CollageAdamW(groups, lr=1e-3, betas=(0.9, 0.95), strategy="light")
    handle = watch(model, optimizer, every=1, sample="all", budget=None)
    train(model, optimizer, 4)
    no_word(handle)
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.add_param_group({"params": list(model[3].parameters())})
    for step in range(4, 8):
        train(model, optimizer, 1, start=step)
        no_word(handle)


def test_elements_without_a_gradient_so_far_drop_nothing():
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 8)).bfloat16()
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, weight_decay=0.0, strategy="light")
    handle = watch(model, optimizer, every=1, sample="all", budget=None)
    for step in range(16):
        optimizer.zero_grad()
        # Four rows that no step had before.
        model(torch.arange(4 * step, 4 * step + 4)).float().square().mean().backward()
        optimizer.step()
        no_word(handle)


@pytest.mark.parametrize("target", ["light", "kahan", "split-master"])
def test_a_few_elements_that_came_back_to_where_they_began_dropped_nothing(target):
    """Lion's steps are of one size: to and fro adds up to 0, and the master weight is the visible one again."""

    def built(strategy):
        torch.manual_seed(0)
        model = nn.ParameterList([torch.randn(16, 8), torch.randn(3), torch.randn(1)]).bfloat16()
        return model, CollageLion(model.parameters(), lr=1e-3, strategy=strategy)

    def steps(model, optimizer, first, count):
        for step in range(first, first + count):
            for place, own in enumerate(model):
                own.grad = torch.ones_like(own) if place == 0 else torch.full_like(own, (-1.0) ** step)
            optimizer.step()

    before, states = built("master-weights")
    steps(before, states, 0, 12)
    model, optimizer = built(target)
    model.load_state_dict(before.state_dict())
    optimizer.load_state_dict(states.state_dict())
    handle = watch(model, optimizer, every=1, sample="all", budget=None)
    steps(model, optimizer, 12, 1)
    assert handle.summary()["layers"]["2"]["residual_dropped_ratio"] == 1.0
    no_word(handle)


def of_grid(grid):
    """The network with weights that are multiples of `grid`; None: as they are drawn."""
    model = network()
    with torch.no_grad():
        for own in model.parameters() if grid else ():
            own.copy_((own.float() / grid).round() * grid)
    return model


@pytest.mark.slow
@pytest.mark.drawn(by=lambda grid, rate, before, target, every: (grid, before, every))
@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("target", ["light", "kahan", "split-master", "split-master-8bit", "master-weights"])
@pytest.mark.parametrize("before", [12, 13])
@pytest.mark.parametrize("rate", [2.0**-8, 2.0**-9, 2.0**-10, 2.0**-12, 2.0**-14])
@pytest.mark.parametrize("grid", [2.0**-9, None])
def test_updates_that_fit_the_weights_leave_no_residual_to_drop(grid, rate, before, target, every, tmp_path):
    """Lion's step is the rate: a power of two is a whole number of gaps, or comes to one after an even number of
    steps."""
    model = of_grid(grid)
    optimizer = CollageLion(model.parameters(), lr=rate, strategy="master-weights")
    train(model, optimizer, before)
    states, kept = copy.deepcopy(optimizer.state_dict()), model.state_dict()
    model = network()
    model.load_state_dict(kept)
    optimizer = CollageLion(model.parameters(), lr=rate, strategy=target)
    optimizer.load_state_dict(states)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "now.pt")
    assert "problem" not in {finding.severity for finding in audit_checkpoint(tmp_path / "now.pt").findings}
    handle = watch(model, optimizer, every=every, sample="all", budget=None, casts=())
    for step in range(before, before + 20):
        train(model, optimizer, 1, start=step)
        no_word(handle)
    assert handle.info.resume_losses == []


@pytest.mark.parametrize("strategy", ["light", "split-master"])
@pytest.mark.parametrize("dropped", ["all", "half", "a layer"])
def test_what_was_dropped_beside_updates_of_a_power_of_two_is_found(strategy, dropped):
    model = network()
    optimizer = CollageLion(model.parameters(), lr=2.0**-16, strategy=strategy)
    train(model, optimizer, 25)
    states = emptied(copy.deepcopy(optimizer.state_dict()), dropped)
    optimizer = CollageLion(model.parameters(), lr=2.0**-16, strategy=strategy)
    optimizer.load_state_dict(states)
    handle = watch(model, optimizer, every=10, sample="all", budget=None)
    train(model, optimizer, 1, start=25)
    assert "residuals are off" in [finding.health for finding in handle.judgement().findings]
    assert bool(handle.info.resume_losses) == (dropped == "all")


@pytest.mark.drawn
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("target", ["light", "split-master"])
def test_lion_resumed_after_a_few_steps_is_accused_of_what_it_dropped_alone(target, count, dropped):
    """Half of its elements are back where they began after two steps, and three eighths after four."""

    def steps(model, optimizer, first, count):
        for step in range(first, first + count):
            generator = torch.Generator().manual_seed(step)
            for own in model:
                own.grad = torch.randn(own.shape, generator=generator).to(own.dtype)
            optimizer.step()

    torch.manual_seed(0)
    # A rate below a quarter of the gap above 1, and half of that below it: each step leaves a residual.
    drawn = [torch.rand(64, 32) + 1.1 for _ in range(2)] + [torch.rand(32) + 1.1 for _ in range(8)]
    model = nn.ParameterList(drawn).bfloat16()
    optimizer = CollageLion(model.parameters(), lr=3e-4, strategy=target)
    steps(model, optimizer, 0, count)
    states = copy.deepcopy(optimizer.state_dict())
    optimizer = CollageLion(model.parameters(), lr=3e-4, strategy=target)
    optimizer.load_state_dict(emptied(states, "all") if dropped else states)
    handle = watch(model, optimizer, every=10, sample="all", budget=None, casts=())
    steps(model, optimizer, count, 1)
    if dropped:
        assert "residuals are off" in [finding.health for finding in handle.judgement().findings]
    else:
        assert handle.step == count + 1
        no_word(handle)
        assert handle.info.resume_losses == []


KEPT = [*(("AdamW", target) for target in TARGETS), ("SGD", "light"), ("Lion", "light")]


def emptied(states, what):
    """The states with residuals dropped: all, each second one, or those of one layer."""
    for number, state in states["state"].items():
        if what == "all":
            state["parameter_low"].zero_()
        elif what == "half":
            state["parameter_low"].view(-1)[::2] = 0
        elif what == "a layer" and number == 0:
            state["parameter_low"].zero_()
        elif what == "left out":
            del state["parameter_low"]
    return states


DROPS = list(product(("all", "half", "a layer", "left out"), (False, True), KEPT))


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize(("dropped", "converted", "kept"), DROPS)
def test_what_a_checkpoint_dropped_is_found_in_the_first_step(dropped, converted, kept):
    rule, strategy = kept
    model, optimizer = of_source(rule, "plain")
    train(model, optimizer, 4)
    if converted:
        model, optimizer = resumed(rule, strategy, model, optimizer.state_dict())
    else:
        optimizer = RULES[rule][0](model.parameters(), strategy=strategy, **RULES[rule][2])
    train(model, optimizer, 21, start=4)
    states = emptied(copy.deepcopy(optimizer.state_dict()), dropped)
    model, optimizer = resumed(rule, strategy, model, states)
    handle = watch(model, optimizer, every=10, sample="all", budget=None)
    train(model, optimizer, 1, start=25)
    judgement = handle.judgement()
    assert "residuals are off" in [finding.health for finding in judgement.findings]
    assert fires(judgement)


@pytest.mark.parametrize("strategy", TARGETS)
def test_residuals_that_are_zeroed_after_each_step_are_found(strategy):
    model = network()
    optimizer = CollageAdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), strategy=strategy)
    handle = watch(model, optimizer, every=2, sample="all", budget=None)

    def zero(stepped, *_):
        for state in stepped.state.values():
            state["parameter_low"].zero_()

    optimizer.register_step_post_hook(zero)
    train(model, optimizer, 5)
    assert handle.summary()["model"]["residual_dropped_ratio"] > 0.95
    assert "residuals are off" in [finding.health for finding in handle.judgement().findings]


def test_a_conversion_is_told_as_one_and_outlives_a_resume():
    model, optimizer = of_source("AdamW", "torch's")
    train(model, optimizer, 4)
    model, optimizer = resumed("AdamW", "split-master", model, optimizer.state_dict())
    for start in (4, 8):
        handle = watch(model, optimizer, every=1, sample="all", budget=None)
        train(model, optimizer, 4, start=start)
        told = handle.info.conversion
        assert told is not None
        assert (told.source, told.target, told.step) == ("plain", "split-master", 4)
        assert "converted from plain to split-master after step 4, where their residuals began empty" in str(handle)
        handle.remove()
        model, optimizer = resumed("AdamW", "split-master", model, optimizer.state_dict())


def test_residuals_that_were_kept_as_something_else_are_no_conversion():
    """A master weight fills them; so what is 0 later was dropped."""
    for source in ("master-weights", "kahan"):
        model, optimizer = of_source("AdamW", source)
        train(model, optimizer, 4)
        _, optimizer = resumed("AdamW", "light", model, optimizer.state_dict())
        assert (optimizer.param_groups[0]["residuals_from"], optimizer.param_groups[0]["converted_from"]) == (0, "")


def test_a_strategy_that_is_changed_between_two_steps_is_a_conversion():
    model, optimizer = of_source("AdamW", "plain")
    handle = watch(model, optimizer, every=1, sample="all", budget=None)
    train(model, optimizer, 4)
    optimizer.param_groups[0]["strategy"] = "light"
    for step in range(4, 8):
        train(model, optimizer, 1, start=step)
        no_word(handle)
    assert handle.info.conversion is not None


def test_states_loaded_into_a_watched_optimizer_begin_a_history_of_their_own():
    """What it held before is not what the loaded states lost."""
    model, optimizer = of_source("AdamW", "plain")
    train(model, optimizer, 4)
    states = copy.deepcopy(optimizer.state_dict())
    optimizer = CollageAdamW(model.parameters(), strategy="light", **RULES["AdamW"][2])
    handle = watch(model, optimizer, every=1, sample="all", budget=None)
    train(model, optimizer, 4)
    optimizer.load_state_dict(states)
    for step in range(4, 8):
        train(model, optimizer, 1, start=step)
        no_word(handle)
    optimizer.load_state_dict(emptied(copy.deepcopy(optimizer.state_dict()), "all"))
    train(model, optimizer, 1, start=8)
    assert "residuals are off" in [finding.health for finding in handle.judgement().findings]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
def test_what_is_known_of_residuals_outlives_a_distributed_checkpoint(flat, tmp_path):
    model, optimizer = of_source("AdamW", "plain")
    train(model, optimizer, 4)
    model, optimizer = resumed("AdamW", "light", model, optimizer.state_dict())
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    again = CollageAdamW(model.parameters(), strategy="light", **RULES["AdamW"][2])
    request = {"optimizer": get_optimizer_state_dict(model, again, options=options)}
    dcp.load(request, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(model, again, request["optimizer"], options=options)
    assert again.param_groups[0]["residuals_from"] == 4
    assert again.param_groups[0]["converted_from"] == "plain"
