"""Every way of keeping weights into every other, for each rule: no false word, no alert, a clean audit.

Fifty steps of each, and 1,500 of each in the nightly lane. What is dropped afterwards is found in each of them.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from collage_agent.audit.report import audit_checkpoint
from collage_agent.handle import watch
from collage_optim import PARAMETER_LOW, STRATEGIES
from collage_optim.strategies import strategy_named

from tests.judgement.test_conversions import (
    RULES,
    SOURCES,
    emptied,
    fires,
    network,
    no_word,
    of_source,
    resumed,
    train,
)

LOSES = ("plain", "fp32-states")
"""Keep no residual: at these rates their updates are lost indeed, and the audit says so."""
BEFORE = 12
"""Steps: enough that a resume that lost something is told."""


def has(rule, strategy):
    """Whether the rule can be kept so: some strategies are about a second moment, which it may lack."""
    try:
        RULES[rule][0](network().parameters(), strategy=strategy, **RULES[rule][2])
    except ValueError:
        return False
    return True


KEPT = {rule: [strategy for strategy in STRATEGIES if has(rule, strategy)] for rule in RULES}
TORCHS = [source for source, (strategy, _) in SOURCES.items() if strategy is None]
CELLS = [
    (rule, source, target)
    for rule in RULES
    for source, target in product([*(TORCHS if RULES[rule][1] else ()), *KEPT[rule]], KEPT[rule])
]


def converted(rule, source, target, folder):
    """A training that was kept one way for twelve steps, and is kept another way from then on."""
    model, optimizer = of_source(rule, source)
    train(model, optimizer, BEFORE)
    model, optimizer = resumed(rule, target, model, optimizer.state_dict())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "now.pt")
    found = audit_checkpoint(folder / "now.pt").findings
    problems = {finding.code for finding in found if finding.severity == "problem"}
    assert problems <= ({"learning-rate-lost"} if target in LOSES else set())
    return model, optimizer


def goes_on(rule, source, target, folder, steps):
    """Watched at every tenth step, its words looked at fifty times."""
    model, optimizer = converted(rule, source, target, folder)
    handle = watch(model, optimizer, every=10, sample="all", budget=None, casts=())
    some = max(steps // 50, 1)
    for start in range(BEFORE, BEFORE + steps, some):
        train(model, optimizer, some, start=start)
        no_word(handle)
        assert not handle.info.resume_losses
    return model, optimizer, handle


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("rule", "source", "target"), CELLS)
@pytest.mark.parametrize("steps", [50, 1500])
def test_no_conversion_is_an_illness(rule, source, target, steps, tmp_path):
    goes_on(rule, source, target, tmp_path, steps)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("dropped", ["all", "half", "a layer"])
@pytest.mark.parametrize(
    ("rule", "source", "target"),
    [cell for cell in CELLS if strategy_named(cell[-1]).parameter_state == PARAMETER_LOW],
)
def test_what_is_dropped_after_a_conversion_is_found(rule, source, target, dropped, tmp_path):
    model, optimizer, handle = goes_on(rule, source, target, tmp_path, 20)
    handle.remove()
    states = copy.deepcopy(optimizer.state_dict())
    model, optimizer = resumed(rule, target, model, emptied(states, dropped))
    handle = watch(model, optimizer, every=10, sample="all", budget=None)
    train(model, optimizer, 1, start=BEFORE + 20)
    assert "residuals are off" in [finding.health for finding in handle.judgement().findings]
    assert fires(handle.judgement())
