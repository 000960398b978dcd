"""What is drawn of a matrix by day covers its rows and columns, or its pairs, and stays the same."""

from itertools import combinations, product

import pytest

from tests.drawn import sample

CELLS = [*product("abcd", (1, 2, 3), (False, True))]


@pytest.mark.parametrize(("pairs", "most"), [(False, 5), (True, 15)])
def test_every_value_or_every_pair_of_them_comes_up_in_few_cells(pairs, most):
    drawn = sample(CELLS, "a test", pairs=pairs)
    for axes in combinations(range(3), 2 if pairs else 1):
        seen = {tuple(CELLS[place][axis] for axis in axes) for place in drawn}
        assert seen == {tuple(cell[axis] for axis in axes) for cell in CELLS}
    assert len(drawn) <= most < len(CELLS)
    assert drawn == sample(CELLS, "a test", pairs=pairs)
    assert drawn != sample(CELLS, "another", pairs=pairs)
