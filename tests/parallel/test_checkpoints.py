"""Distributed checkpoints across strategies and ranks: two write, four read and write again, one reads.

Of ranks that go on nothing is said where the resume is whole; what one lost is found by it and in the sum.
"""

import copy
import functools
import os
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from collage_agent.handle import watch
from collage_optim import (
    PARAMETER_LOW,
    STRATEGIES,
    CollageAdam,
    CollageAdamW,
    CollageLion,
    CollageOptimizer,
    CollageSGD,
    load_distributed,
)
from collage_optim.tensor_step import local_part
from torch import distributed
from torch.distributed.checkpoint import state_dict as views

from collage_monitor.diagnosis.residuals import DROPPED
from collage_monitor.statistics import finish
from tests.parallel.launch import among_asked, asked, launch
from tests.parallel.measuring import Recorder, merged_layers
from tests.parallel.models import fsdp2, injected, replicated
from tests.parallel.test_optimizers import held, stepped, whole

pytestmark = pytest.mark.slow

STEPS = 6
OPTIONS: dict[str, Any] = {"lr": 2**-9, "weight_decay": 2**-4}
SHARDED = [name for name, strategy in STRATEGIES.items() if not strategy.first_moment.has_scales]
"""Blocks of 8-bit states are not for shards: one process reads into them, no rank writes them."""
SOURCES: dict[str, Any] = {
    **{name: functools.partial(CollageAdamW, strategy=name, **OPTIONS) for name in SHARDED},
    "torch": functools.partial(torch.optim.AdamW, **OPTIONS),
    "torch fp32": functools.partial(torch.optim.AdamW, **OPTIONS),
}
FORMS = ("nested", "flattened", "its own")
"""How the optimizer's part of a checkpoint is laid out: torch's two ways, and `optimizer.state_dict()` itself."""


def form_of(source):
    return FORMS[list(SOURCES).index(source) % len(FORMS)] if source in STRATEGIES else "nested"


def dtype_of(source):
    return torch.float32 if source == "torch fp32" else torch.bfloat16


def kind_of(source, **_):
    """How a source is read: its form, what stands beside its weights, and what beside those of its target."""
    beside = STRATEGIES[source].parameter_state if source in STRATEGIES else source
    return [form_of(source), beside, STRATEGIES[targets_of(source)].parameter_state]


def targets_of(source):
    """One target each on four ranks, so that every strategy is read once."""
    return SHARDED[(list(SOURCES).index(source) + 1) % len(SHARDED)]


def layout(model, optimizer, form):
    if form == "its own":
        return optimizer.state_dict()
    options = views.StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    return views.get_optimizer_state_dict(model, optimizer, options=options)


def write(folder):
    """Of each source what two ranks hold together; checkpoints of it in `folder`, of shards and of replicas."""
    seen = {}
    for source, make in among_asked(SOURCES).items():
        model, optimizer = fsdp2(dtype_of(source), make=make)
        stepped(model, optimizer, STEPS)
        content = {"model": views.get_model_state_dict(model), "optim": layout(model, optimizer, form_of(source))}
        dcp.save(content, checkpoint_id=folder / source)
        weights = {name: whole(value) for name, value in model.state_dict().items()}
        states = {
            name: {key: whole(value) for key, value in optimizer.state[parameter].items()}
            for name, parameter in model.named_parameters()
        }
        seen[source] = weights, states
        model, optimizer = replicated(dtype_of(source), make=make)
        stepped(model, optimizer, STEPS)
        if distributed.get_rank() == 0:
            torch.save((model.state_dict(), optimizer.state_dict()), folder / f"{source}.pt")
    return seen


def reshard(folder):
    """What four ranks hold together after reading each source under another strategy; written anew from there."""
    seen = {}
    for source in among_asked(SOURCES):
        target = targets_of(source)
        model, optimizer = fsdp2(torch.bfloat16, make=functools.partial(CollageAdamW, lr=1.0, strategy=target))
        load_distributed(folder / source, model, optimizer)
        seen[source] = held(model, optimizer), optimizer.param_groups[0]["lr"]
        dcp.save(
            {"model": model.state_dict(), "optim": layout(model, optimizer, "nested")},
            checkpoint_id=folder / f"{source} again",
        )
    return seen


def read_alone(folder, target):
    """One process reads a folder under a strategy."""
    model = injected(torch.bfloat16)
    optimizer = CollageAdamW(model.parameters(), lr=1.0, strategy=target)
    load_distributed(folder, model, optimizer)
    return held(model, optimizer), optimizer.param_groups[0]["lr"]


def expected(seen, target):
    """The same by `load_state_dict` in one process, which other tests hold to be right."""
    weights, states = copy.deepcopy(seen)
    model = injected(torch.bfloat16)
    model.load_state_dict(weights)
    optimizer = CollageAdamW(model.parameters(), lr=1.0, strategy=target)
    saved = optimizer.state_dict()
    for number, name in enumerate(weights):
        saved["state"][number] = states[name]
        if weights[name].dtype == torch.float32:
            saved["state"][number]["master_parameter"] = weights[name]
    optimizer.load_state_dict(saved)
    return held(model, optimizer)


def of_each_kind(test):
    return pytest.mark.drawn(by=kind_of)(pytest.mark.parametrize("source", SOURCES)(test))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def written(request, folder):
    return launch("test_checkpoints.write", 2, folder, ASKED=asked(request, "source"))[0]


@pytest.fixture(scope="module")
def resharded(request, folder, written):
    return launch("test_checkpoints.reshard", 4, folder, ASKED=asked(request, "source"))[0]


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


@of_each_kind
def test_four_ranks_read_what_two_wrote_under_another_strategy(source, written, resharded):
    found, rate = resharded[source]
    assert_same(found, expected(written[source], targets_of(source)))
    assert rate == OPTIONS["lr"]


@pytest.mark.nightly
@pytest.mark.parametrize("target", STRATEGIES)
@pytest.mark.parametrize("source", SOURCES)
def test_one_process_reads_every_source_under_every_strategy(source, target, written, folder):
    found, rate = read_alone(folder / source, target)
    assert_same(found, expected(written[source], target))
    assert rate == OPTIONS["lr"]


@of_each_kind
def test_one_process_reads_what_four_wrote_after_two(source, resharded, folder):
    found, _ = read_alone(folder / f"{source} again", targets_of(source))
    assert_same(found, resharded[source][0])


@pytest.mark.parametrize("source", ["plus"])
def test_what_is_not_there_is_named(source, written, folder):
    model = injected(torch.bfloat16)
    model.head = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"has no weight head\.bias"):
        load_distributed(folder / source, model, CollageAdamW(model.parameters(), strategy="plus"))
    del model.head
    with pytest.raises(ValueError, match="it is of another update rule"):
        load_distributed(folder / source, model, CollageLion(model.parameters(), strategy="light"))


RULES: dict[str, Any] = {
    "AdamW": functools.partial(CollageAdamW, lr=2**-9),
    "Adam": functools.partial(CollageAdam, lr=2**-9),
    "SGD": functools.partial(CollageSGD, lr=2**-9, momentum=0.9),
    "Lion": functools.partial(CollageLion, lr=1e-3),
}


def _has(rule, strategy):
    """Whether the rule can be kept so, on shards."""
    try:
        RULES[rule]([torch.zeros(1, dtype=torch.bfloat16)], strategy=strategy)
    except ValueError:
        return False
    return not STRATEGIES[strategy].first_moment.has_scales


KEPT = {rule: [strategy for strategy in STRATEGIES if _has(rule, strategy)] for rule in RULES}
CONVERSIONS = [
    (rule, source, target)
    for rule, kept in KEPT.items()
    for source, target in product(kept, kept)
    if STRATEGIES[target].parameter_state == PARAMETER_LOW
]


def _words(model, optimizer, first, **options):
    """What is known after one watched step."""
    handle = watch(model, optimizer, every=1, sample="all", budget=None, casts=(), first_step=first, **options)
    stepped(model, optimizer, 1, first=first)
    judged = handle.judgement()
    handle.remove()
    return {"losses": handle.info.resume_losses, "findings": judged.findings, "health": judged.health}


def go_on(folder):
    """What each rank says of each source."""
    seen = {}
    for source, make in among_asked(SOURCES).items():
        model, optimizer = fsdp2(dtype_of(source), make=make)
        if isinstance(optimizer, CollageOptimizer):
            load_distributed(folder / source, model, optimizer)
        else:
            request: Any = {
                "model": views.get_model_state_dict(model),
                "optim": views.get_optimizer_state_dict(model, optimizer),
            }
            dcp.load(request, checkpoint_id=folder / source)
            views.set_model_state_dict(model, request["model"])
            views.set_optimizer_state_dict(model, optimizer, request["optim"])
        seen[source, "shards"] = _words(model, optimizer, STEPS + 1)
        model, optimizer = replicated(dtype_of(source), make=make)
        weights, states = torch.load(folder / f"{source}.pt", weights_only=False)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        seen[source, "replicas"] = _words(model, optimizer, STEPS + 1)
    return seen


def drop_by_one(folder):
    """Of each conversion of the rule RULE: what is said of it, and once the last rank's residuals were dropped."""
    seen = {}
    last = distributed.get_rank() == distributed.get_world_size() - 1
    for rule, source, target in (cell for cell in CONVERSIONS if cell[0] == os.environ["RULE"]):
        model, optimizer = fsdp2(torch.bfloat16, make=functools.partial(RULES[rule], strategy=source))
        stepped(model, optimizer, STEPS)
        model, optimizer = _loaded(rule, target, model, optimizer)
        whole = _words(model, optimizer, STEPS + 1)
        stepped(model, optimizer, STEPS, first=STEPS + 2)
        model, optimizer = _loaded(rule, target, model, optimizer)
        for state in optimizer.state.values() if last else ():
            local_part(state[PARAMETER_LOW]).zero_()
        recorder = Recorder()
        spoilt = _words(model, optimizer, 2 * STEPS + 2, reporter=recorder)
        [measured] = recorder.measurements
        table = measured.table().array
        totals = {"layers": [measured.layout.layers], "statistics": [measured.layout.statistics], "totals": [table]}
        seen[rule, source, target] = whole, {**spoilt, **totals}
    return seen


def _loaded(rule, strategy, model, optimizer):
    """The same model and states under a strategy."""
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = fsdp2(torch.bfloat16, make=functools.partial(RULES[rule], strategy=strategy))
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    return model, optimizer


def off(words):
    """What is said against what stands beside the weights."""
    return [found.text for found in words["findings"] if found.health == "residuals are off"]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)], ids=["on 2", "on 4"])
def resumed(request, folder, written):
    return launch("test_checkpoints.go_on", request.param, folder, ASKED=asked(request, "source"))


@pytest.mark.drawn(by=lambda source, kind, **_: [*product(kind_of(source), [kind])])
@pytest.mark.parametrize("kind", ["shards", "replicas"])
@pytest.mark.parametrize("source", SOURCES)
def test_whole_resumes_of_two_ranks_are_not_accused(source, kind, resumed):
    for words in (seen[source, kind] for seen in resumed):
        assert words["losses"] == []
        assert off(words) == []


@pytest.fixture(scope="module")
def dropped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dropped")
    return functools.cache(lambda rule: launch("test_checkpoints.drop_by_one", 2, folder, RULE=rule))


@pytest.mark.nightly
@pytest.mark.parametrize(("rule", "source", "target"), CONVERSIONS)
def test_what_one_rank_dropped_after_a_conversion_is_found(rule, source, target, dropped):
    cell, ranks = (rule, source, target), dropped(rule)
    for seen in ranks:
        whole, _ = seen[cell]
        assert whole["losses"] == []
        assert off(whole) == []
    (_, kept), (_, lost) = (seen[cell] for seen in ranks)
    assert off(kept) == []
    assert off(lost)
    totals = merged_layers([kept, lost], 0).values()
    keys = {key for layer in totals for key in layer}
    summed = {key: np.nansum([layer.get(key, np.nan) for layer in totals]) for key in keys}
    assert 0.3 < finish(DROPPED.metric, summed) < 0.9
    assert finish(DROPPED.metric, summed) > DROPPED.threshold
