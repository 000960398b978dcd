"""Update rules, each written once for every strategy and every arithmetic."""

from collage_agent.optim.rules.adam import AdamRule
from collage_agent.optim.rules.lion import LionRule
from collage_agent.optim.rules.rule import Group, Moment, Rule
from collage_agent.optim.rules.sgd import SGDRule

__all__ = ["AdamRule", "Group", "LionRule", "Moment", "Rule", "SGDRule"]
