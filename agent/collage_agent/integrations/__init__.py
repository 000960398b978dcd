"""Integrations of training frameworks, one framework a file; nothing here is imported before it is asked for.

collage_agent.integrations.transformers.CollageCallback     Hugging Face Trainer
collage_agent.integrations.lightning.CollageCallback        Lightning Trainer
collage_agent.integrations.accelerate.watch_accelerated     Accelerate, with CollageTracker for its logging
collage_agent.integrations.attach                           `collage-monitor run`, without a change of code
"""
