"""The intended update u: the displacement of a step in exact arithmetic, from the user's own optimizer or its
rule."""

from collage_agent.intent.before_after import BeforeAfter, WholeTensor
from collage_agent.intent.intent_choice import Intent, OwnRuleIntent, choose_intent
from collage_agent.intent.shadow import Shadow

__all__ = ["BeforeAfter", "Intent", "OwnRuleIntent", "Shadow", "WholeTensor", "choose_intent"]
