"""Everything that may befall a server at once, in short; `make hostile` goes on for an hour."""

from __future__ import annotations

import pytest

from tests.server.store.postgresql import programs_or_skip
from tests.torture.hour import HostilePostgresqlLives, HostileSqliteLives, hour

pytestmark = pytest.mark.slow

MEBIBYTES = 512


def held(minutes, seed, folder, backend="sqlite"):
    folder.chmod(0o755)
    findings, figures = hour(minutes, seed, folder, backend=backend)
    assert findings == []
    assert figures["acknowledged"] > 0
    assert figures["memory, MiB at most"] <= MEBIBYTES
    assert figures["/healthz p99, ms"] > 0, "it was answered"
    return figures


def test_half_a_minute(tmp_path):
    assert sum(held(0.5, 3, tmp_path)["kills"].values()) > 3


@pytest.mark.nightly
@pytest.mark.parametrize("lives", [HostileSqliteLives, HostilePostgresqlLives])
def test_ten_minutes(tmp_path, lives):
    """With every kind of end."""
    backend = "sqlite" if lives is HostileSqliteLives else "postgresql"
    if backend == "postgresql":
        programs_or_skip()
    assert set(lives.kinds) - held(10.0, 17, tmp_path, backend)["kills"].keys() == set()
