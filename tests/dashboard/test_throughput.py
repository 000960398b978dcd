"""Tokens per second from cumulative tokens over the run's clock."""

import msgspec
import pytest
from collage_dashboard.pages.comparison_content import runs_with_throughput, throughput_of
from collage_dashboard.server_reader import Reader

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
    compared = client.compare(["run-plain", "run-plus"], "edq_ratio")
    logged, other = compared.runs
    kept = {name: value for name, value in other.mean_scalars.items() if name != "tokens_per_second"}
    silent = msgspec.structs.replace(other, mean_scalars=kept)
    reader = Reader(lambda: client)
    assert runs_with_throughput(reader, compared) is compared.runs
    assert runs_with_throughput(reader, "refused") is None
    filled = runs_with_throughput(reader, msgspec.structs.replace(compared, runs=[logged, silent]))
    assert filled is not None
    assert filled[0] == logged
    assert filled[1].mean_scalars["tokens_per_second"] == pytest.approx(2048 / 0.5)
