"""The one table of totals: float64 [statistic][layer], whose two axes are only ever appended to.

The agent's measurer fills one, several optimizers are joined into one, and a report, the journal and the readers
pass one on. Numbers are read by name, never by position.

It is never sent or stored as such; only names of rows and columns have a meaning outside
(`tests/contract/test_totals_table.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, overload

__all__ = ["Axis", "Table"]

Values = TypeVar("Values")
"""A numpy array, or a tensor on the training's device: anything that is indexed by a row number."""


class Axis(Sequence[str]):
    """Names in the order in which they were first seen, only ever appended to: a shorter copy is a prefix."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._positions: dict[str, int] = {}
        self.extend(names)

    def extend(self, names: Iterable[str]) -> None:
        """Append the new names."""
        for name in names:
            self._positions.setdefault(name, len(self._positions))

    def position(self, name: str) -> int:
        """The position of the name.

        Raises:
            KeyError: it was never added.
        """
        return self._positions[name]

    def positions(self, names: Iterable[str]) -> list[int]:
        """The position of each of the names, in the order given."""
        return [self._positions[name] for name in names]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return tuple(self._positions)[index]

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __contains__(self, name: object) -> bool:
        return name in self._positions

    def __repr__(self) -> str:
        return f"Axis({list(self)!r})"


class Table(Mapping[str, Values], Generic[Values]):
    """Totals by statistic: `table[key]` is the row of that statistic, [layers] or [points, layers] or [points].

    `array` has one row for each of `statistics`; its last axis follows `layers`, unless they are None: then the
    layers are merged to the model. NaN stands for "not reported". As a mapping it is the input of merging and
    finishing.
    """

    def __init__(self, statistics: Axis, layers: Axis | None, array: Values) -> None:
        self.statistics = statistics
        self.layers = layers
        self.array = array

    def __getitem__(self, key: str) -> Values:
        row: Values = self.array[self.statistics.position(key)]  # type: ignore[index]
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self.statistics)

    def __len__(self) -> int:
        return len(self.statistics)

    def __contains__(self, key: object) -> bool:
        return key in self.statistics
