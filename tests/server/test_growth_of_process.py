"""A real server with --memory 512M, fed at its limits once and four times over, and asked everything."""

from __future__ import annotations

import pytest

from benchmarks._serving import run_cluster
from tests.server.store.postgresql import programs_or_skip
from tests.torture.growth import FEEDS, fed_and_asked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fill", FEEDS, ids=lambda fill: fill.__name__)
@pytest.mark.nightly
def test_a_server_at_a_limit_stays_within_512_mib(tmp_path, fill):
    fed_and_asked(tmp_path, fill, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("fill", FEEDS, ids=lambda fill: fill.__name__)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_server_at_four_times_a_limit_stays_within_512_mib(tmp_path, fill, database):
    if database == "sqlite":
        fed_and_asked(tmp_path, fill, 4)
        return
    programs_or_skip()
    with run_cluster() as cluster:
        assert cluster is not None
        fed_and_asked(tmp_path, fill, 4, database=cluster[0])
