"""Totals that the kernels of our optimizers add up within a step, in the place of a sample.

Kernels are played by the same code in torch's operations; `tests/optim/test_device_step.py` has the real ones.
"""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.step import totals as totals_module
from collage_agent.step.bucket import LOOK_EVERY, Bucket
from collage_agent.step.totals import is_fast_in_fp64
from collage_optim import STRATEGIES, CollageAdamW, FoundTotals, base, compiled, integer_codes, update_rules
from collage_optim.arithmetic import WideArithmetic
from collage_optim.device_code import CHUNK_ELEMENTS
from collage_optim.step_totals import advance_and_add
from collage_optim.tensor_step import chunks, component_names, step_tensors

from examples.extension_rule.adabelief_rule import AdaBelief
from tests.agent.step.test_measurer import totals_of
from tests.optim.with_triton import RULES, drawn_options, gradients_for, like, totals_beside_the_agents

ELEMENTS = (1_408, 128, 4_096)
"""Whole blocks: in torch's operations nothing hides what lies behind a tensor's end."""
WATCHING: dict[str, Any] = {"every": 1, "sample": 512, "budget": None, "casts": ()}


class PlayedKernel:
    """`DeviceStep` without a device."""

    def __init__(self, form):
        pass

    def __call__(self, step, members):
        for member in members:
            if step.asked is None:
                step_tensors(dataclasses.replace(step, launch=None), [member])
                continue
            names = ["parameter", "gradient", *component_names(step.strategy, step.moments)]
            flat = {name: own.view(-1) for name, own in member.components(names).items()}
            rows, first = [], 0
            for chunk in chunks(dict(integer_codes.unpacked(flat)), CHUNK_ELEMENTS):
                source = step.seeding and step.seeding.at(member.position).from_element(first)
                rows.append(advance_and_add(step, WideArithmetic(), chunk, step.scalars, step.asked.exact, source))
                first += chunk["parameter"].numel()
            sums = torch.stack([torch.stack([*row.values()]) for row in rows]).sum(0, keepdim=True)
            step.asked.found.append(FoundTotals([member.parameter], tuple(rows[0]), sums))


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(base, "launches", lambda device: True)
    monkeypatch.setattr(compiled, "DeviceStep", PlayedKernel)
    monkeypatch.setattr(compiled, "_difference_from_eager", lambda *given: None)
    monkeypatch.setattr(base, "adds_totals", lambda structure: True)
    compiled.device_step.cache_clear()
    yield
    compiled.device_step.cache_clear()


def weights(elements=ELEMENTS, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [torch.nn.Parameter((torch.randn(size) * 0.02).to(dtype)) for size in elements]


@pytest.fixture
def gathered(monkeypatch):
    """How often a bucket has gathered its sample."""
    times: list[int] = []
    original = Bucket.gather_before

    def gather(*own, **more):
        times.append(1)
        return original(*own, **more)

    monkeypatch.setattr(Bucket, "gather_before", gather)
    return times


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_the_sums_are_those_of_a_whole_sample(rule, monkeypatch):
    """Counts are equal, sums but for the order of their terms: for each strategy that the rule has."""
    monkeypatch.setitem(update_rules._ADDED, "adabelief", AdaBelief())
    kind, own = RULES[rule]
    taken = 0
    for strategy in STRATEGIES:
        draw = random.Random(f"{rule} {strategy}")
        options = {**own, **drawn_options(draw, rule), "strategy": strategy, "compiled": None}
        members = weights(dtype=draw.choice([torch.bfloat16, torch.bfloat16, torch.float16]))
        try:
            kind(like(members), **options)
        except ValueError:
            continue
        gradients, case = gradients_for(draw, members), (rule, options)
        taken += totals_beside_the_agents(kind, options, members, gradients, case, lambda own: own.step())
    assert taken >= 8 * len(ELEMENTS)


def watched(strategy="plus", steps=0, **options):
    """An optimizer and its watch after so many steps."""
    members = weights()
    optimizer = CollageAdamW(members, lr=1e-3, strategy=strategy, seed=1)
    handle = watch(torch.nn.ParameterList(members), optimizer, **{**WATCHING, **options})
    for number in range(steps):
        step(optimizer, number)
    return optimizer, handle


def step(optimizer, number=0):
    generator = torch.Generator().manual_seed(number)
    for member in optimizer.param_groups[0]["params"]:
        member.grad = (torch.randn(member.shape, generator=generator) * 1e-2).to(member.dtype)
    optimizer.step()


def same(one, other):
    """Whether two numbers of a summary are equal, but for the order in which sums were added."""
    return one == other or (None not in (one, other) and one == pytest.approx(other, rel=1e-9, abs=1e-9))


@pytest.mark.slow
@pytest.mark.parametrize("casts", [("bf16",), ()], ids=["copies at each step", "no copies"])
def test_the_table_is_whole_and_the_sample_says_the_rest(casts, gathered, monkeypatch):
    """Without copies the sample is taken at every tenth measured step only, and the summary keeps what it said."""
    optimizer, handle = watched(casts=casts, steps=2 * LOOK_EVERY)
    assert optimizer.step_totals is None
    assert len(gathered) == (2 * LOOK_EVERY if casts else 2)
    for name, totals in totals_of(handle).items():
        assert totals["sampled"] == totals["elements"] == ELEMENTS[int(name)]
        classes = ("nonfinite", "idle", "lost", "distorted", "faithful")
        assert sum(totals[key] for key in classes) == ELEMENTS[int(name)]
    found = handle.summary()["model"]
    monkeypatch.setattr(base, "launches", lambda device: False)
    expected = watched(casts=casts, sample="all", steps=2 * LOOK_EVERY)[1].summary()["model"]
    assert found.keys() == expected.keys()
    for key in ("edq_ratio", "edq_ratio_low", "lost_update_ratio", "lost_update_ratio_high", "grad_norm", "idle"):
        assert same(found[key], expected[key]), key
    assert found["edq_ratio_low"] == found["edq_ratio"] == found["edq_ratio_high"]
    assert same(found["state_decrement_ratio/exp_avg_sq"], expected["state_decrement_ratio/exp_avg_sq"])
    assert found["half_ulp_margin"] is not None
    assert found["residual_zero_ratio"] is not None


def test_training_is_what_it_is_without_a_watch():
    plain = CollageAdamW(weights(), lr=1e-3, strategy="coupled-8", seed=1)
    optimizer, _ = watched("coupled-8", steps=3)
    for number in range(3):
        step(plain, number)
    for one, other in zip(plain.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)


def test_two_watches_of_one_optimizer_have_the_same_sums():
    optimizer, first = watched()
    second = watch(torch.nn.ParameterList(optimizer.param_groups[0]["params"]), optimizer, **WATCHING)
    step(optimizer)
    step(optimizer)
    mine, theirs = totals_of(first)["0"], totals_of(second)["0"]
    assert mine["sampled"] == ELEMENTS[0]
    assert mine["intended_squared_sum"] == theirs["intended_squared_sum"]


def test_where_a_tensor_is_stepped_otherwise_the_sample_is_taken_at_each_step(gathered):
    """A group in the storage's own arithmetic is no kernel. What the kernels stepped is whole even so."""
    members = weights()
    groups = [{"params": members[:1], "arithmetic": "storage"}, {"params": members[1:]}]
    optimizer = CollageAdamW(groups, lr=1e-3, strategy="plus")
    handle = watch(torch.nn.ParameterList(members), optimizer, **WATCHING)
    for _ in range(3):
        for member in members:
            member.grad = torch.full_like(member, 1e-2)
        optimizer.step()
    totals = totals_of(handle)
    assert [totals[name]["sampled"] for name in ("0", "1", "2")] == [512, 128, 4_096]
    assert len(gathered) == 3 * 2


@pytest.mark.parametrize("needs", [{"oracle": True}, {"windows": (2,)}])
def test_what_follows_a_sample_from_step_to_step_has_it_at_each(needs, gathered):
    _, handle = watched(steps=4, **needs)
    assert len(gathered) >= 4
    assert totals_of(handle)["2"]["sampled"] == 4_096


def test_a_step_without_kernels_after_steps_with_them_is_a_gap_and_then_sampled(monkeypatch, gathered):
    """As when a CUDA graph is captured: nothing is made up."""
    optimizer, handle = watched(steps=2)
    assert len(gathered) == 1
    monkeypatch.setattr(base, "launches", lambda device: False)
    step(optimizer)
    assert math.isnan(totals_of(handle)["2"]["lost"])
    step(optimizer)
    assert len(gathered) == 2
    assert totals_of(handle)["2"]["sampled"] == 512


def test_after_a_step_that_raised_nobody_asks_and_the_next_sums_are_its_own():
    optimizer, handle = watched(steps=1)
    member = optimizer.param_groups[0]["params"][0]
    member.grad = torch.ones_like(member).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    step(optimizer, 7)
    totals = totals_of(handle)["0"]
    gradient = member.grad.double()
    assert totals["gradient_squared_sum"] == pytest.approx(float(gradient @ gradient), rel=1e-12)
    assert optimizer.step_totals is None


@pytest.mark.parametrize(
    ("module", "name"), [(totals_module, "is_fast_in_fp64"), (base, "launches")], ids=["slow fp64", "a CPU"]
)
def test_where_fp64_is_slow_or_nothing_launches_the_sample_is_taken(module, name, gathered, monkeypatch):
    monkeypatch.setattr(module, name, lambda device: False)
    _, handle = watched(steps=2)
    assert len(gathered) == 2
    assert totals_of(handle)["2"]["sampled"] == 512


@pytest.mark.parametrize(
    ("capability", "fast"), [((8, 0), True), ((9, 0), True), ((8, 9), False), ((12, 0), False), ((10, 3), False)]
)
def test_devices_for_computing_are_fast_in_fp64_and_those_for_games_are_not(monkeypatch, capability, fast):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    is_fast_in_fp64.cache_clear()
    assert is_fast_in_fp64(torch.device("cuda", 0)) is fast
    is_fast_in_fp64.cache_clear()
