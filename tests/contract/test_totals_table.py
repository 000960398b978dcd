"""The one table: rows by name, axes that only grow."""

import numpy as np
import pytest

from collage_monitor.statistics import finish
from collage_monitor.totals_table import Axis, Table


def test_an_axis_only_grows_and_keeps_its_places():
    axis = Axis(["elements", "lost"])
    axis.extend(["lost", "idle"])
    assert list(axis) == ["elements", "lost", "idle"]
    assert axis.positions(["idle", "elements"]) == [2, 0]
    assert axis[:2] == ("elements", "lost")
    assert "stray" not in axis
    with pytest.raises(KeyError, match="stray"):
        axis.position("stray")


def test_a_table_is_read_by_name_and_finished_as_it_is():
    values = np.array([[4.0, 8.0], [2.0, 2.0]])
    table = Table(Axis(["intended_squared_sum", "intended_effective_sum"]), Axis(["a", "b"]), values)
    assert table["intended_effective_sum"].tolist() == [2.0, 2.0]
    assert finish("edq_ratio", table).tolist() == [0.5, 0.25]
    assert "edq_ratio" not in table
    assert table.get("idle") is None
