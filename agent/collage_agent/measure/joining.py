"""One table from the totals of several meters: rows and columns under their common numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_agent.measure.meter import Meter
from collage_agent.training.parameters import WatchedParameter

__all__ = ["Joined"]


class Joined:
    """The rows (`statistics`) and columns (`watched`) of several meters; both are only ever appended to."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = list(meters)
        self.statistics: list[str] = []
        self.watched: list[WatchedParameter] = []
        self._rows: dict[str, int] = {}
        self._columns: list[list[int]] = [[] for _ in meters]
        self._places: list[tuple[Tensor, Tensor] | None] = [None for _ in meters]
        self._take_over()

    def totals(self, parts: Sequence[Tensor | None]) -> Tensor:
        """fp64 [statistics][watched], on the first part's device, of each meter's totals; NaN where it has none.

        No synchronisation, once the places of a meter's rows and columns are known on the device.
        """
        self._take_over()
        if len(parts) == 1 and parts[0] is not None:
            return parts[0]
        device = next(part.device for part in parts if part is not None)
        shape = (len(self.statistics), len(self.watched))
        joined = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        for index, part in enumerate(parts):
            if part is not None:
                rows, columns = self._place(index, part, device)
                joined[rows, columns] = part.to(device)
        return joined

    def _take_over(self) -> None:
        """Number the rows and columns that meters have added."""
        for index, meter in enumerate(self._meters):
            for key in meter.statistics:
                if key not in self._rows:
                    self._rows[key] = len(self.statistics)
                    self.statistics.append(key)
            for entry in meter.watched[len(self._columns[index]) :]:
                self._columns[index].append(len(self.watched))
                self.watched.append(entry)

    def _place(self, index: int, part: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        known = self._places[index]
        if known is None or (len(known[0]), known[1].shape[1]) != tuple(part.shape):
            rows = torch.tensor([self._rows[key] for key in self._meters[index].statistics]).unsqueeze(1)
            columns = torch.tensor(self._columns[index]).unsqueeze(0)
            known = self._places[index] = rows.to(device), columns.to(device)
        return known
