"""One table from the parts of a measured step: the rows and columns of each find their places by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from collage_agent.buckets.totals import BASE_STATISTICS
from collage_monitor.table import Axis, Table

__all__ = ["TableUnion"]

_PLACES: Final = 256
_Part = tuple[tuple[str, ...], tuple[str, ...], torch.device]


class TableUnion:
    """The statistics and layers of all that is watched; both are only ever appended to.

    Parts are tables of some statistics and some layers, of buckets, oracles and windows of one optimizer or more.
    """

    def __init__(self) -> None:
        self.statistics = Axis(BASE_STATISTICS)
        self.layers = Axis()
        self._places: dict[_Part, tuple[Tensor, Tensor]] = {}

    def of(self, parts: Sequence[Table[Tensor]], layers: Iterable[str]) -> Table[Tensor]:
        """All parts in one table, on the first one's device; NaN where no part says anything, a later part wins.

        `layers` are those that are watched now, whether reported or not. No synchronisation, once the places of a
        part's rows and columns are known on the device.
        """
        self.layers.extend(layers)
        for part in parts:
            self.statistics.extend(part.statistics)
        device = parts[0].array.device if parts else torch.device("cpu")
        shape = (len(self.statistics), len(self.layers))
        array = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        for part in parts:
            array[self._place(part, device)] = part.array.to(device)
        return Table(self.statistics, self.layers, array)

    def _place(self, part: Table[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        assert part.layers is not None
        name = tuple(part.statistics), tuple(part.layers), device
        known = self._places.get(name)
        if known is None:
            if len(self._places) >= _PLACES:
                self._places.clear()
            rows = torch.tensor(self.statistics.positions(part.statistics)).unsqueeze(1)
            columns = torch.tensor(self.layers.positions(part.layers)).unsqueeze(0)
            known = self._places[name] = rows.to(device), columns.to(device)
        return known
