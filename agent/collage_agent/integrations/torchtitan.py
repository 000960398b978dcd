"""torchtitan: an override of its optimizer's configuration, named on the command line, watches what it builds.

python -m torchtitan.train --module llama3 --config llama3_debugmodel \\
    --override.imports=collage_agent.integrations.torchtitan.watched

Options of `watch` follow the name as JSON: 'collage_agent.integrations.torchtitan.watched={"every": 20}'.
`COLLAGE_PROJECT` and the other variables say where to report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

from torch import nn

from collage_agent.integrations.attachment import Attachment, needs
from collage_agent.watch_options import WatchArguments, checked_options

try:
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.override import derive, override
except ImportError as error:
    raise needs("torchtitan", error) from error

__all__ = ["WatchedOptimizers", "watched"]


class WatchedOptimizers(OptimizersContainer):
    """torchtitan's optimizers, unchanged, watched from their first step on. The run ends with the process."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's own, and the options of `collage_agent.watch`."""

        watch_options: dict[str, Any]

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        # The parts of one rank's pipeline stages: torchtitan names their layers as in the whole model.
        model = model_parts[0] if len(model_parts) == 1 else _Parts(model_parts)
        attachment = Attachment(None, None, None, config.watch_options)  # type: ignore[arg-type]
        attachment.begin_run()
        attachment.watch(model, [self])


class _Parts(nn.Module):
    """Parts of one model under their common names: no layer is in two of them."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        for part in parts:
            for name, child in part.named_children():
                self._merge(name, child)

    def _merge(self, name: str, child: nn.Module) -> None:
        known = self._modules.get(name)
        if known is None:
            self.add_module(name, child)
        else:
            both = nn.Module()
            both._modules = {**known._modules, **child._modules}
            self._modules[name] = both


@override(  # type: ignore[untyped-decorator]
    target=OptimizersContainer.Config, description="What low precision does to the updates is watched."
)
def watched(
    config: OptimizersContainer.Config, **watch_options: Unpack[WatchArguments]
) -> WatchedOptimizers.Config:
    """The configuration whose optimizers are watched.

    Raises:
        ValueError, TypeError: a watch option that cannot be used.
    """
    checked_options(**watch_options)
    replaced: WatchedOptimizers.Config = derive(config, WatchedOptimizers.Config, watch_options=dict(watch_options))
    return replaced
