"""A conversion is no illness, nor is a residual of 0 that no step has moved yet. One that was dropped is, and is
found in the first step.

Every way of keeping weights into every other, for each rule: by day a sample of them, over a few steps.
"""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from collage_agent.audit.checkpoint_audit import audit_checkpoint
from collage_agent.handle import watch
from collage_optim import PARAMETER_LOW, STRATEGIES, CollageAdam, CollageAdamW, CollageLion, CollageSGD
from collage_optim.strategies import strategy_named
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


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
SOURCES = {"torch's": (None, torch.bfloat16), "torch's in fp32": (None, torch.float32)}
TARGETS = ("light", "plus", "kahan", "split-master", "split-master-8bit")
LOSES = ("plain", "fp32-states")
"""Keep no residual: at these rates their updates are lost indeed, and the audit says so."""
BEFORE = 12
"""Steps before a conversion: enough that a resume that lost something is told."""


def has(rule, strategy):
    """Whether the rule can be kept so: some strategies are about a second moment, which it may lack."""
    try:
        RULES[rule][0](network().parameters(), strategy=strategy, **RULES[rule][2])
    except ValueError:
        return False
    return True


WAYS = {rule: [strategy for strategy in STRATEGIES if has(rule, strategy)] for rule in RULES}
CELLS = [
    (rule, source, target)
    for rule in RULES
    for source, target in product([*(SOURCES if RULES[rule][1] else ()), *WAYS[rule]], WAYS[rule])
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


def watched(model, optimizer, every=1):
    return watch(model, optimizer, every=every, sample="all", budget=None, casts=())


def problems(model, optimizer, folder):
    """What the audit of a checkpoint of them finds."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "now.pt")
    found = audit_checkpoint(folder / "now.pt").findings
    return {finding.code for finding in found if finding.severity == "problem"}


def goes_on(handle, model, optimizer, steps, schedule=None):
    """Trained on through these steps, with no word after any."""
    for step in steps:
        train(model, optimizer, 1, start=step, schedule=schedule)
        no_word(handle)


def is_found(handle):
    """Whether it is told that residuals were dropped."""
    return "residuals are off" in [finding.health for finding in handle.judgement().findings]


def no_word(handle):
    judgement = handle.judgement()
    said = [finding.text for finding in judgement.findings if finding.key.startswith("residual")]
    assert judgement.health != "residuals are off"
    assert not [text for text in said if "0 again" in text or "are 0 before" in text]
    assert not fires(judgement)


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("steps", [12, *(pytest.param(steps, marks=pytest.mark.nightly) for steps in (50, 1500))])
@pytest.mark.parametrize(("rule", "source", "target"), CELLS)
def test_no_conversion_is_an_illness_and_what_is_dropped_after_it_is_found(rule, source, target, steps, tmp_path):
    """Watched at the first and each tenth step; its words are looked at where they may be others."""
    model, optimizer = of_source(rule, source)
    train(model, optimizer, BEFORE)
    model, optimizer = resumed(rule, target, model, optimizer.state_dict())
    assert problems(model, optimizer, tmp_path) <= ({"learning-rate-lost"} if target in LOSES else set())
    handle, done, some = watched(model, optimizer, 10), 0, max(steps // 50, 10)
    for end in (1, *range(some, steps + 1, some), steps):
        train(model, optimizer, end - done, start=BEFORE + done)
        done = end
        no_word(handle)
        assert not handle.info.resume_losses
    handle.remove()
    drops = ("all", "half", "a layer", "left out") if target in TARGETS else ("all", "half", "a layer")
    for dropped in drops if strategy_named(target).parameter_state == PARAMETER_LOW else ():
        states = emptied(copy.deepcopy(optimizer.state_dict()), dropped)
        again, spoilt = resumed(rule, target, model, states)
        handle = watched(again, spoilt, 10)
        train(again, spoilt, 1, start=BEFORE + steps)
        assert is_found(handle), dropped
        assert fires(handle.judgement()), dropped
        handle.remove()


def warming_up(strategy):
    """From a rate of 0: its fourth step is the first that moves a weight."""
    model = network()
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), strategy=strategy)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, step - 2) / 20)


@pytest.mark.slow
@pytest.mark.drawn(by=lambda strategy, every: (strategy in ("light", "plus", "full"), every))
@pytest.mark.parametrize("every", [1, 2, 10])
@pytest.mark.parametrize("strategy", ["light", "plus", "kahan", "split-master", "full"])
def test_a_warm_up_from_a_rate_of_0_drops_nothing(strategy, every):
    model, optimizer, schedule = warming_up(strategy)
    handle = watched(model, optimizer, every)
    for step in range(14):
        train(model, optimizer, 1, start=step, schedule=schedule)
        no_word(handle)
        # Where nothing was intended no word is possible; a rate that is next to 0 moves no visible weight.
        assert handle.judgement().health in ("healthy", "unknown")


@pytest.mark.parametrize("stops_at", [1, 3, 5])
def test_a_checkpoint_of_a_warm_up_from_a_rate_of_0_drops_nothing(stops_at, tmp_path):
    """At step 3 no step has moved a weight, and the next one does."""
    model, optimizer, schedule = warming_up("light")
    train(model, optimizer, stops_at, schedule=schedule)
    assert not problems(model, optimizer, tmp_path)
    model, optimizer = resumed("AdamW", "light", model, optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 1e-3
    handle = watched(model, optimizer)
    goes_on(handle, model, optimizer, range(stops_at, stops_at + 3))


def test_a_layer_set_free_by_its_rate_and_a_group_added_drop_nothing():
    model = network()
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters()), "lr": 0.0},
        {"params": list(model[1].parameters())},
    ]
    optimizer = CollageAdamW(groups, lr=1e-3, betas=(0.9, 0.95), strategy="light")
    handle = watched(model, optimizer)
    train(model, optimizer, 4)
    no_word(handle)
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.add_param_group({"params": list(model[3].parameters())})
    goes_on(handle, model, optimizer, range(4, 8))


def test_elements_without_a_gradient_so_far_drop_nothing():
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 8)).bfloat16()
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, weight_decay=0.0, strategy="light")
    handle = watched(model, optimizer)
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
    handle = watched(model, optimizer)
    steps(model, optimizer, 12, 1)
    assert handle.summary()["layers"]["2"]["residual_dropped_ratio"] == 1.0
    no_word(handle)


@pytest.mark.slow
@pytest.mark.drawn(by=lambda grid, rate, before, target, every: (grid, before, every))
@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("target", ["light", "kahan", "split-master", "split-master-8bit", "master-weights"])
@pytest.mark.parametrize("before", [12, 13])
@pytest.mark.parametrize("rate", [2.0**-8, 2.0**-9, 2.0**-10, 2.0**-12, 2.0**-14])
@pytest.mark.parametrize("grid", [2.0**-9, None])
def test_updates_that_fit_the_weights_leave_no_residual_to_drop(grid, rate, before, target, every, tmp_path):
    """Lion's step is the rate: a power of two is a whole number of gaps, or comes to one after an even number of
    steps. grid: what the weights are multiples of, None: as they are drawn."""
    model = network()
    with torch.no_grad():
        for own in model.parameters() if grid else ():
            own.copy_((own.float() / grid).round() * grid)
    optimizer = CollageLion(model.parameters(), lr=rate, strategy="master-weights")
    train(model, optimizer, before)
    states = copy.deepcopy(optimizer.state_dict())
    optimizer = CollageLion(model.parameters(), lr=rate, strategy=target)
    optimizer.load_state_dict(states)
    assert not problems(model, optimizer, tmp_path)
    handle = watched(model, optimizer, every)
    goes_on(handle, model, optimizer, range(before, before + 20))
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
    handle = watched(model, optimizer, 10)
    train(model, optimizer, 1, start=25)
    assert is_found(handle)
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
    handle = watched(model, optimizer, 10)
    steps(model, optimizer, count, 1)
    if dropped:
        assert is_found(handle)
    else:
        assert handle.step == count + 1
        no_word(handle)
        assert handle.info.resume_losses == []


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


@pytest.mark.parametrize("strategy", TARGETS)
def test_residuals_that_are_zeroed_after_each_step_are_found(strategy):
    model = network()
    optimizer = CollageAdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), strategy=strategy)
    handle = watched(model, optimizer, 2)
    for step in range(5):
        train(model, optimizer, 1, start=step)
        emptied(optimizer.state_dict(), "all")
    assert handle.summary()["model"]["residual_dropped_ratio"] > 0.95
    assert is_found(handle)


def test_a_conversion_is_told_as_one_and_outlives_a_resume():
    model, optimizer = of_source("AdamW", "torch's")
    train(model, optimizer, 4)
    model, optimizer = resumed("AdamW", "split-master", model, optimizer.state_dict())
    for start in (4, 8):
        handle = watched(model, optimizer)
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
    handle = watched(model, optimizer)
    train(model, optimizer, 4)
    optimizer.param_groups[0]["strategy"] = "light"
    goes_on(handle, model, optimizer, range(4, 8))
    assert handle.info.conversion is not None


def test_states_loaded_into_a_watched_optimizer_begin_a_history_of_their_own():
    """What it held before is not what the loaded states lost."""
    model, optimizer = of_source("AdamW", "plain")
    train(model, optimizer, 4)
    states = copy.deepcopy(optimizer.state_dict())
    optimizer = CollageAdamW(model.parameters(), strategy="light", **RULES["AdamW"][2])
    handle = watched(model, optimizer)
    train(model, optimizer, 4)
    optimizer.load_state_dict(states)
    goes_on(handle, model, optimizer, range(4, 8))
    optimizer.load_state_dict(emptied(copy.deepcopy(optimizer.state_dict()), "all"))
    train(model, optimizer, 1, start=8)
    assert is_found(handle)


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
