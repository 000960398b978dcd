"""Everything that may befall a server at once; `make hostile` goes on for an hour."""

import tempfile
from pathlib import Path

import pytest

from drills.torture.hour import HostilePostgresqlLives, HostileSqliteLives, hour
from tests.server.store.postgresql import programs_or_skip

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

MEBIBYTES = 512


def held(minutes, seed, backend="sqlite"):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # PostgreSQL runs as another user.
        findings, figures = hour(minutes, seed, Path(folder), backend=backend)
    assert findings == []
    assert figures["acknowledged"] > 0
    assert figures["memory, MiB at most"] <= MEBIBYTES
    assert figures["/healthz p99, ms"] > 0, "it was answered"
    return figures


@pytest.mark.parametrize("lives", [HostileSqliteLives, HostilePostgresqlLives])
def test_ten_minutes(lives):
    """With every kind of end."""
    backend = "sqlite" if lives is HostileSqliteLives else "postgresql"
    if backend == "postgresql":
        programs_or_skip()
    assert set(lives.kinds) - held(10.0, 17, backend)["kills"].keys() == set()
