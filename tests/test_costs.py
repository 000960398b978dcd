"""Who is named at the end of a run: what costs much and is not explained; a folder explains what is not certain."""

from types import SimpleNamespace

import pytest

from tests import costs

LEDGER = {"tests/a/test_one.py::test_dear": "why", "tests/a": "why", "tests/b/test_two.py": "why"}


@pytest.mark.parametrize(
    ("name", "seconds", "told"),
    [
        ("tests/c/test_three.py::test", 0.5, False),
        ("tests/c/test_three.py::test", 0.6, True),
        ("tests/a/test_one.py::test_dear[7]", 9.0, False),
        ("tests/a/test_one.py::test_other", 20.0, False),
        ("tests/a/test_one.py::test_other", 20.1, True),
        ("tests/b/test_two.py::Class::test[1]", 1.0, False),
        ("tests/b/test_twofold.py::test", 1.0, True),
    ],
)
def test_what_costs_much_is_named_unless_it_is_explained(monkeypatch, name, seconds, told):
    monkeypatch.setattr(costs, "explained", lambda: LEDGER)
    found = costs.Costs(None)
    found._seconds = {name: seconds}
    assert (name in found.unexplained()) is told


def test_a_process_that_ends_and_is_not_waited_for_takes_nothing_from_the_sum():
    found, item = costs.Costs(None), SimpleNamespace(user_properties=[])
    with pytest.MonkeyPatch.context() as patch:  # The run itself is measured, too.
        patch.setattr(costs, "cpu_seconds", iter([120.0, 121.0, 127.5, 5.0]).__next__)
        next(found.pytest_runtest_protocol(item))
        for when in ("setup", "call", "teardown"):
            found.pytest_runtest_makereport(item, SimpleNamespace(when=when))
    assert dict(item.user_properties) == {"cpu_seconds": 7.5}


def test_what_is_explained_is_there():
    folder = costs._LEDGER.parents[1]
    assert [name for name in costs.explained() if not (folder / name.partition("::")[0]).exists()] == []
