"""Axolotl: a plugin that adds the Hugging Face callback to its trainer. In the YAML file of a training:

plugins:
  - collage_agent.integrations.axolotl.CollagePlugin
collage:               # optional
  project: my-project
  every: 20
"""

from __future__ import annotations

from typing import Any

from collage_agent.integrations.attachment import needs

try:
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    raise needs("axolotl", error) from error

from collage_agent.integrations.transformers import CollageCallback

__all__ = ["CollagePlugin"]


class CollagePlugin(BasePlugin):
    """Watches what Axolotl's trainer steps; its configuration's `collage` holds arguments of `CollageCallback`."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {}

    def register(self, cfg: dict[str, Any]) -> None:
        """Take over the options, from the configuration as it was written.

        Raises:
            ValueError, TypeError: an option that cannot be used.
        """
        self.options = dict(cfg.get("collage") or {})
        CollageCallback(**self.options)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[CollageCallback]:
        """The callback; the trainer has been made by now."""
        return [CollageCallback(**self.options)]
