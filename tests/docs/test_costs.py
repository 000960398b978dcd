"""The fast half: the tests that cost least, as far as its time reaches."""

import json

from tests.costs import QUICK_CPU_SECONDS, _costly_functions


def test_the_cheapest_tests_make_the_fast_half(tmp_path):
    half = QUICK_CPU_SECONDS / 2
    record = {"": [9, half / 2], "a.py::dear": [1, half], "a.py::cheap_each": [500, half], "a.py::last": [1, 1.0]}
    (tmp_path / "costs.json").write_text(json.dumps(record))
    assert _costly_functions(tmp_path / "costs.json") == {"a.py::dear"}
