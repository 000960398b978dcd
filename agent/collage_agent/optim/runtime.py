"""What an optimizer needs only while it runs: scratch, generators, and the totals of a measured step.

None of it is state: a copy or a checkpoint starts without it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collage_agent.optim.arithmetic import Workspace
from collage_agent.optim.stepping import chunk_elements

__all__ = ["Runtime"]


@dataclass
class Runtime:
    """Made once for each optimizer, filled as devices and formats turn up.

    measure_next: the next step is a measured one. totals: by position, of the last measured step.
    """

    workspaces: dict[tuple[torch.device, torch.dtype], Workspace] = field(default_factory=dict)
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)
    measure_next: bool = False
    totals: dict[int, Tensor] = field(default_factory=dict)
    record: Callable[[int, Tensor], None] | None = None

    def workspace(self, device: torch.device, dtype: torch.dtype) -> Workspace:
        """The scratch for a device and wide format, shared by all tensors."""
        found = self.workspaces.get((device, dtype))
        if found is None:
            found = self.workspaces[device, dtype] = Workspace(chunk_elements(device), dtype, device)
        return found

    def generator(self, device: torch.device) -> torch.Generator:
        """The source of stochastic rounding on a device, beside the process-wide generators."""
        found = self.generators.get(device)
        if found is None:
            found = self.generators[device] = torch.Generator(device)
        return found

    def begin_step(self) -> None:
        """Record totals during the step that begins, if that was asked for."""
        self.record = None
        if self.measure_next:
            self.measure_next = False
            self.totals = {}
            self.record = self.totals.__setitem__
