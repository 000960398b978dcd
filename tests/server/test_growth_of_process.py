"""A real server with --memory 512M, fed at its limits once and four times over, and asked everything."""

from __future__ import annotations

import pytest

from benchmarks._serving import run_cluster
from drills.torture.growth import FEEDS, MIB, exported, fed_and_asked, many_statistics, measured
from tests.server.store.postgresql import programs_or_skip

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_exports_at_the_limit_of_statistics_stay_within_the_budget(tmp_path):
    """Four at once took 444 MiB of 512: what an export computes and writes was nobody's.

    That exports ask for what they take, `test_memory_budget` holds by day.
    """
    with measured(tmp_path, memory="384M") as (connection, port, peak):
        many_statistics(connection, 1, reports=30)
        sizes = exported(port, ("csv", "parquet", "csv"))
    assert min(sizes) > MIB
    assert peak.bytes <= 384 * MIB, peak.told()


@pytest.mark.parametrize("fill", FEEDS, ids=lambda fill: fill.__name__)
def test_a_server_at_a_limit_stays_within_512_mib(tmp_path, fill):
    fed_and_asked(tmp_path, fill, 1)


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
