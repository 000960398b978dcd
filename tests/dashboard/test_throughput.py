"""Tokens per second from cumulative tokens over the run's clock."""

import msgspec
import pytest
from collage_dashboard.pages.comparison_curves import lacks_throughput, throughput_of, with_throughput

from tests.dashboard.figures.answers import series


def test_the_slope_between_first_and_last_point():
    assert throughput_of(series([100.0, 250.0, 500.0], "tokens", axis="time")) == pytest.approx(400 / 20)


def test_undefined_points_do_not_count():
    assert throughput_of(series([None, 100.0, "NaN", 300.0], "tokens", axis="time")) == pytest.approx(200 / 20)


def test_one_point_has_no_slope():
    assert throughput_of(series([100.0], "tokens", axis="time")) is None
    assert throughput_of(series([], "tokens", axis="time")) is None


@pytest.mark.slow
def test_only_what_was_not_logged_is_filled_in(server):
    client = server.client()
    logged, other = client.compare(["run-plain", "run-plus"], "edq_ratio").runs
    kept = {name: value for name, value in other.mean_scalars.items() if name != "tokens_per_second"}
    silent = msgspec.structs.replace(other, mean_scalars=kept)
    assert not lacks_throughput([logged])
    assert lacks_throughput([logged, silent])
    filled = with_throughput([logged, silent], client.compare(["run-plain", "run-plus"], "tokens", axis="time"))
    assert filled[0] is logged
    assert filled[1].mean_scalars["tokens_per_second"] == pytest.approx(2048 / 0.5)
