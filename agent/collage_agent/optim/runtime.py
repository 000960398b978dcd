"""What optimizers need only while they run: scratch and random generators.

None of it is state: a copy or a checkpoint starts without it.
"""

import threading
from dataclasses import dataclass, field

import torch

from collage_agent.optim.arithmetic import Workspace
from collage_agent.optim.stepping import longest_chunk

__all__ = ["Runtime", "release_scratch", "shared_workspace"]

_SCRATCH = threading.local()


def shared_workspace(device: torch.device, dtype: torch.dtype) -> Workspace:
    """The scratch for a device and wide format: one a thread, for all optimizers.

    Training that steps in the backward pass has an optimizer for every parameter, and would have as many scratches.
    """
    spaces: dict[tuple[torch.device, torch.dtype], Workspace] = _SCRATCH.__dict__.setdefault("spaces", {})
    found = spaces.get((device, dtype))
    if found is None:
        found = spaces[device, dtype] = Workspace(longest_chunk(device), dtype, device)
    return found


def release_scratch() -> None:
    """Free this thread's scratch; the next step makes it anew."""
    _SCRATCH.__dict__.pop("spaces", None)


@dataclass
class Runtime:
    """Made once for each optimizer, filled as devices turn up."""

    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def generator(self, device: torch.device) -> torch.Generator:
        """The source of stochastic rounding on a device, beside the process-wide generators."""
        found = self.generators.get(device)
        if found is None:
            found = self.generators[device] = torch.Generator(device)
        return found
