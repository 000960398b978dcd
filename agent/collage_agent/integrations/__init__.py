"""Integrations of training frameworks, one framework a file; nothing here is imported before it is asked for.

collage_agent.integrations.transformers.CollageCallback     Hugging Face Trainer
collage_agent.integrations.lightning.CollageCallback        Lightning Trainer
collage_agent.integrations.accelerate.watch_accelerated     Accelerate, with CollageTracker for its logging
collage_agent.integrations.axolotl.CollagePlugin            Axolotl, a line of YAML
collage_agent.integrations.llamafactory                     LLaMA-Factory, `python -m` in its command's place
collage_agent.integrations.torchtitan.watched               torchtitan, an override on the command line
collage_agent.integrations.verl                             verl, which loads it by itself
collage_agent.integrations.attach                           `collage-monitor run`, without a change of code
"""
