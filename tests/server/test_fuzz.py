"""A short fuzz of the server; `python -m tests.server.fuzz` runs it longer."""

from __future__ import annotations

import pytest

from tests.server.fuzz import fuzz, raw, target

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cases", [150, pytest.param(4500, marks=pytest.mark.nightly)])
def test_no_answer_is_a_failure(tmp_path, cases):
    statuses, _ = fuzz(tmp_path, cases=cases, seed=7)
    assert sum(statuses.values()) == cases
    assert {200, 400, 404, 415, 422} <= set(statuses)


def test_a_failure_is_found(tmp_path, monkeypatch):
    with target(tmp_path) as reached:
        monkeypatch.setattr(reached.app.state.collage.memory.bodies, "receive", lambda _: 1 / 0)
        with pytest.raises(AssertionError, match="answered 500"):
            raw(reached, 20, 1)
