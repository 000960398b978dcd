"""The intended update u: what a step would do in exact arithmetic, from the user's own optimizer or its rule."""

from collage_agent.intent.before_after import BeforeAfter
from collage_agent.intent.choose import Intent, OwnRuleIntent, choose_intent
from collage_agent.intent.oracle import Oracle
from collage_agent.intent.shadow import Shadow
from collage_agent.intent.whole_tensor import WholeTensor

__all__ = ["BeforeAfter", "Intent", "Oracle", "OwnRuleIntent", "Shadow", "WholeTensor", "choose_intent"]
