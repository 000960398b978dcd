"""Strategies and rules of other packages: the examples, installed beside us, and what is refused."""

import dataclasses
from importlib.metadata import EntryPoint

import pytest
from collage_optim import (
    STRATEGIES,
    CollageAdamW,
    RuleOptimizer,
    StateStorage,
    StorageStrategy,
    extensions,
    strategies,
    update_rules,
)

from collage_monitor import extensions as contract
from collage_monitor.definitions import Strategy
from collage_monitor.errors import CatalogueError
from collage_monitor.strategies import catalogue_of
from tests.extensions import run_with
from tests.optim.models import parameters

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("example", "part"),
    [
        ("extension_rule", "with_rule.run"),
        pytest.param("extension_strategy", "with_strategy.run", marks=pytest.mark.nightly),
        pytest.param("extension_rule", "with_rule.compile_it", marks=pytest.mark.nightly),
    ],
)
def test_an_example_works_as_installed(example, part, tmp_path):
    done = run_with([example], f"from tests.optim import {part.partition('.')[0]}; {part}()", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def added(monkeypatch):
    """What packages add, by group; nothing was asked for before."""
    found: dict[str, dict[str, object]] = {}
    for module in (strategies, update_rules):
        monkeypatch.setattr(module, "extensions", lambda group: found.get(group, {}))
        monkeypatch.setattr(module, "_ADDED", {})
    return found


def test_what_no_package_adds_and_what_is_no_strategy_or_rule_is_named(added):
    with pytest.raises(ValueError, match="Invalid rule: 'adabelief'; no installed package adds a rule"):
        RuleOptimizer(parameters(), "adabelief")
    with pytest.raises(ValueError, match="Invalid strategy: 'stochastic-plus'; use one of plain, "):
        CollageAdamW(parameters(), strategy="stochastic-plus")
    added["collage_agent.strategies"] = {"mine": STRATEGIES["plus"]}
    added["collage_agent.rules"] = {"class": update_rules.LionRule}
    words = r"collage_agent\.strategies 'mine' must be a StorageStrategy of that name"
    with pytest.raises(ValueError, match=words):
        CollageAdamW(parameters(), strategy="mine")
    with pytest.raises(ValueError, match=r"collage_agent\.rules 'class' must be an UpdateRule object, not ABCMeta"):
        RuleOptimizer(parameters(), "class")


REGISTERED = {
    "none": [],
    "in the order of their names": [("b", "collage_optim:STRATEGIES"), ("a", "math:pi")],
    "twice": [("a", "math:pi"), ("a", "math:e")],
    "of no module": [("a", "no_such_module:thing")],
    "of no name": [("a", "math:no_such_name")],
}


@pytest.mark.parametrize("entries", REGISTERED.values(), ids=REGISTERED)
def test_the_optimizers_find_and_refuse_what_the_contract_does(entries, monkeypatch):
    """Each reads its own groups, without the other."""
    outcomes: list[object] = []
    for module in (extensions, contract):
        points = [EntryPoint(name, value, "collage_agent.rules") for name, value in entries]
        monkeypatch.setattr(module, "entry_points", lambda group, points=points: points)
        try:
            outcomes.append(list(module.extensions.__wrapped__("collage_agent.rules").items()))
        except (ValueError, CatalogueError) as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert bool(outcomes[0]) == bool(entries)


def test_a_strategy_of_a_package_does_not_replace_one_of_ours(added):
    wide = StateStorage.WIDE
    added["collage_agent.strategies"] = {"plain": StorageStrategy("plain", wide, wide, wide)}
    assert CollageAdamW(parameters(), strategy="plain").param_groups[0]["strategy"] == "plain"
    assert strategies.known_strategy("plain") is STRATEGIES["plain"]


def test_only_weights_are_compensated():
    with pytest.raises(ValueError, match="only a weight can be COMPENSATED"):
        StorageStrategy("mine", StateStorage.SINGLE, StateStorage.COMPENSATED, StateStorage.SINGLE)


def test_the_catalogue_takes_strategies_of_their_own_name():
    mine = Strategy("mine", "Mine", "weights", 8)
    assert list(catalogue_of([], {"mine": mine})) == ["mine"]
    for name, entry in (("plain", dataclasses.replace(mine, name="plain")), ("other", mine), ("mine", "mine")):
        with pytest.raises(CatalogueError, match=f"collage_monitor.strategies '{name}' must be a Strategy"):
            catalogue_of([Strategy("plain", "Plain", "weights", 8)], {name: entry})
