"""What gaps show, in words: only an interval without 0 makes a strategy worse or better."""

from collage_studies.results import gaps_in_words, mean_curve

from collage_monitor.seeds import Estimate
from tests.studies.records import PLAIN, training


def test_words_follow_the_intervals():
    found = {
        "a": Estimate(0.1, 3, 0.05, 0.15),
        "b": Estimate(0.3, 3, 0.2, 0.4),
        "c": Estimate(0.2, 3, -0.1, 0.5),
        "d": Estimate(-0.2, 3, -0.3, -0.1),
        "e": Estimate(0.5, 1),
        "f": None,
    }
    assert gaps_in_words(found, "+.3f") == (
        "`b` (+0.300) and `a` (+0.100) end worse than fp32 beyond chance. "
        "`d` (-0.200) ends better than fp32 beyond chance. "
        "No difference from fp32 is shown for `c`: every interval includes 0 and lies within ±0.500. "
        "One seed gives no interval for `e`."
    )


def test_an_interval_that_ends_at_0_shows_nothing():
    assert gaps_in_words({"a": Estimate(0.1, 3, 0.0, 0.2)}).startswith("No difference from fp32 is shown")
    assert gaps_in_words({}) == "Nothing was compared."


def test_a_mean_curve_leaves_undefined_points_out():
    runs = [training(PLAIN, curves={"edq_ratio": values}) for values in ([1.0, None, None], [3.0, 5.0, None])]
    points = mean_curve(runs, "edq_ratio")
    assert (points.x, points.y) == ([10, 20], [2.0, 5.0])
