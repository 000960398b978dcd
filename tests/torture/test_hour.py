"""Everything that may befall a server at once, in short; `make hostile` goes on for an hour."""

from __future__ import annotations

import pytest

from tests.torture.hour import HostileLives, hour

pytestmark = pytest.mark.slow

MEBIBYTES = 512


def held(minutes, seed, folder):
    folder.chmod(0o755)
    findings, figures = hour(minutes, seed, folder)
    assert findings == []
    assert figures["acknowledged"] > 0
    assert figures["memory, MiB at most"] <= MEBIBYTES
    assert figures["/healthz p99, ms"] > 0, "it was answered"
    return figures


def test_half_a_minute(tmp_path):
    assert sum(held(0.5, 3, tmp_path)["kills"].values()) > 3


@pytest.mark.nightly
def test_ten_minutes(tmp_path):
    assert figures_of_all_kinds(held(10.0, 17, tmp_path)) == set()


def figures_of_all_kinds(figures):
    """The kinds of ends that did not come."""
    return set(HostileLives.kinds) - figures["kills"].keys()
