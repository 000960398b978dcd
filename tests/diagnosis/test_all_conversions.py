"""Every way of keeping weights into every other, for each rule: no false word, no alert, a clean audit.

Fifty steps of each, and 1,500 of each in the nightly lane. What is dropped afterwards is found in each of them.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from collage_agent.audit.checkpoint_audit import audit_checkpoint
from collage_agent.handle import watch
from collage_optim import PARAMETER_LOW, STRATEGIES
from collage_optim.strategies import strategy_named

from tests.diagnosis.test_conversions import (
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
    """Watched at the first and each tenth step; its words are looked at where they may be others."""
    model, optimizer = converted(rule, source, target, folder)
    handle = watch(model, optimizer, every=10, sample="all", budget=None, casts=())
    done, some = 0, max(steps // 50, 10)
    for end in (1, *range(some, steps + 1, some)):
        train(model, optimizer, end - done, start=BEFORE + done)
        done = end
        no_word(handle)
        assert not handle.info.resume_losses
    handle.remove()
    return model, optimizer


def drops_are_found(rule, target, model, optimizer, taken):
    """After so many steps all residuals are dropped, half of them, or those of a layer."""
    if strategy_named(target).parameter_state != PARAMETER_LOW:
        return
    for dropped in ("all", "half", "a layer"):
        states = emptied(copy.deepcopy(optimizer.state_dict()), dropped)
        again, spoilt = resumed(rule, target, model, states)
        handle = watch(again, spoilt, every=10, sample="all", budget=None, casts=())
        train(again, spoilt, 1, start=taken)
        judgement = handle.judgement()
        assert "residuals are off" in [finding.health for finding in judgement.findings], dropped
        assert fires(judgement), dropped
        handle.remove()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("steps", [50, 1500])
@pytest.mark.parametrize(("rule", "source", "target"), CELLS)
def test_no_conversion_is_an_illness_and_what_is_dropped_after_it_is_found(rule, source, target, steps, tmp_path):
    model, optimizer = goes_on(rule, source, target, tmp_path, steps)
    drops_are_found(rule, target, model, optimizer, BEFORE + steps)
