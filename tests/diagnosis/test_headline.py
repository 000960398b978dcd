"""The sentence about a run: what is wrong, how much now, where and since when."""

import numpy as np
import pytest

from collage_monitor.diagnosis import Case, Evidence, History, Track, judge, since_beyond
from collage_monitor.onset import LayerChange, Onset

LOSING = {"lost_update_ratio": 0.7, "update_error_ratio": 0.5, "edq_ratio": 0.8, "measured_steps": 30.0}
STATE = "state_decrement_ratio/exp_avg_sq"


def track(values, steps=None):
    steps = list(range(1, len(values) + 1)) if steps is None else steps
    return Track(steps, steps, values)


def judgement(model=LOSING, lost=None, steps=None, changes=(), **facts):
    """The judgement of these numbers; lost: the share of the updates lost at each step."""
    tracks = {} if lost is None else {"lost_update_ratio": track(lost, steps)}
    facts = {"first_step": 1, "last_step": 120, "history": History(tracks, changes=changes), **facts}
    return judge(Evidence(model, **facts))


def losing_layer(lost=0.7, error=0.9, elements=10.0):
    sizes = {"intended_norm": 1.0, "elements": elements}
    return {"lost_update_ratio": lost, "update_error_ratio": error, **sizes}


def test_the_layers_that_lose_most_are_those_that_lose_more_than_half_in_the_column_beside():
    """ "5 of 29 layers lose most of theirs" stood beside a column in which 8 lost more than half."""
    layers = {f"blocks.{place}.weight": losing_layer(error=error) for place, error in enumerate((0.9, 0.1, 0.2))}
    layers["head.weight"] = losing_layer(lost=0.4)
    found = judgement(layers=layers)
    assert "3 layers lose most of their updates (blocks.0.weight, …: 75.0 % of the measured elements" in found.text
    assert found.headline.endswith("3 of 4 layers lose most of theirs: layers 0 to 2, 75.0 % of the elements.")


def test_what_the_model_loses_and_where_most_is_lost_are_two_facts():
    """ "Loses 57.6 % of its updates, in 14 layers" was said of 14 layers that hold 35.7 % of the elements."""
    layers = {f"blocks.{place}.weight": losing_layer(0.9, 0.9) for place in (1, 2, 4)}
    layers |= {f"blocks.{place}.weight": losing_layer(0.4, 0.4, 30.0) for place in (5, 6)}
    said = judgement(layers=layers).headline
    assert "3 of 5 layers lose most of theirs: between 1 and 4, 33.3 % of the elements" in said
    assert "updates, in" not in said
    lost, changed = [0.0] * 19 + [0.7] * 11, tuple(LayerChange(name, 1.0, 0.1) for name in list(layers)[:3])
    # What began with a fall, up to the step at which it settled, began by it, be it ever so slight.
    for fell in (Onset(19, 20, 20, 1.0, 0.6, changed), Onset(18, 19, 20, 1.0, 0.98, changed)):
        said = judgement(lost=lost, layers=layers, changes=[fell]).headline
        assert "(EDQ 0.800), since step 20" in said
        assert "; 3 of 5 layers changed then: between 1 and 4" in said


def test_nearly_all_layers_are_more_than_nine_of_ten():
    for count, said in ((10, "9 of 10 layers lose most of theirs"), (11, "nearly all layers lose most of theirs")):
        layers = {f"blocks.{place}.weight": losing_layer() for place in range(count - 1)}
        assert said in judgement(layers=layers | {"head.weight": losing_layer(lost=0.4)}).headline


def test_what_moves_is_told_as_it_is_now():
    """A cosine to zero: "48.3 % of updates are lost, from the start; EDQ 0.985" was said of a run that stands
    still: 88 % lost, EDQ 0.16, since the rate fell."""
    lost = [0.45, *[0.02] * 9, 0.04, 0.13, 0.5, 0.56, 0.57, 0.63, 0.78, 0.88]
    edq = {"edq_ratio": 0.985, "edq_ratio_low": 0.983, "edq_ratio_high": 0.987}
    now = {"edq_ratio": 0.161, "lost_update_ratio": 0.881}
    found = judgement({**LOSING, **edq, "lost_update_ratio": 0.3}, lost, now=now, last_step=18)
    assert found.headline == "Loses 88.1 % of its updates now (EDQ 0.161), since step 12."
    assert found.short == "loses 88.1 % of its updates"
    assert "30.0 % (88.1 % now) of the updates are rounded away" in found.text


def test_what_was_lost_and_is_not_any_more_is_told_as_past():
    found = judgement(now={"lost_update_ratio": 0.01, "edq_ratio": 1.0})
    assert found.headline == "Lost 70.0 %, now 1.0 % (EDQ 1.000)."


def test_a_number_that_was_good_and_is_not_now_makes_no_witness():
    """ "The oracle agrees (1.000)" was said while it was at 1.138."""
    model = {"edq_ratio": 1.0, "edq_oracle_ratio": 1.0, "intended_norm": 1.0}
    found = judge(Evidence(model, now={"edq_ratio": 1.0, "edq_oracle_ratio": 1.138, "intended_norm": 1.0}))
    assert found.health == "unknown"
    assert "EDQ against the oracle is 1.138 now, 1.000 over these steps" in found.text
    assert "agrees" not in found.text
    faded = judge(Evidence({**model, STATE: 1.0}, now={"edq_oracle_ratio": 1.138, "intended_norm": 0.01}))
    assert faded.health == "healthy", "the end of a schedule to zero does not decide"


def test_since_is_where_the_level_was_passed_for_good_ramps_too():
    """A ramp over nine points has no onset; one point on the other side does not begin it anew."""
    ramp = [0.0] * 10 + [0.02, 0.04, 0.06, 0.1, 0.2, 0.04, 0.3, 0.5, 0.8]
    assert since_beyond(track(ramp), 0.05, below=False) == 13
    assert since_beyond(track([0.9] * 5), 0.05, below=False) == 1
    assert since_beyond(track([0.9]), 0.05, below=False) is None, "one step has no since"
    for back in ([0.5, 0.9, 0.0, 0.0], [0.9, 0.0]):
        assert since_beyond(track(back), 0.05, below=False) is None, "not beyond it now"
    assert since_beyond(track([np.nan, 0.9, 0.0, 0.0, 0.9, 0.9]), 0.05, below=False) == 5
    fallen = [0.9, 1.0, 1.0, 0.99, 0.94, 0.9, 0.8]
    assert since_beyond(track(fallen), 0.95, below=True) == 5


def test_from_the_start_takes_more_than_the_first_step_of_a_warm_up():
    starts = [
        ([0.9] * 9, None, ", from the start."),
        ([0.0, *[0.9] * 8], None, ", from the start."),
        ([0.9, 0.0, 0.0, 0.9, 0.9, 0.9], None, ", since step 4."),
        ([0.9] * 5, [10, 20, 30, 40, 50], ", since the first measured step (10)."),
        ([0.9], None, "."),
    ]
    for lost, steps, since in starts:
        assert judgement(lost=lost, steps=steps).headline == f"Loses 70.0 % of its updates (EDQ 0.800){since}"


def test_merged_points_are_read_again_until_the_step_is_known():
    steps = list(range(1, 161))
    values = [0.0] * 104 + [0.9] * 56

    def read(first, last):
        chosen = [step for step in steps if first <= step <= last]
        return {"lost_update_ratio": Track(chosen, chosen, [values[step - 1] for step in chosen])}

    merged = np.array(values).reshape(-1, 16).mean(1)
    coarse = Track(steps[::16], steps[15::16], merged)
    history = History({"lost_update_ratio": coarse}, finer=read)
    assert history.since("lost_update_ratio", None, 0.05, below=False) == (105, ", since step 105")
    alone = History({"lost_update_ratio": coarse})
    assert alone.since("lost_update_ratio", None, 0.05, below=False) == (112, ", since step 112"), "its last step"
    of_layer = History(of_layer=lambda key, layer: coarse, finer=read)
    assert of_layer.since("lost_update_ratio", "a", 0.05, below=False) == (112, ", since step 112")
    undefined = History({"lost_update_ratio": track([np.nan, np.nan, 0.0, 0.0, 0.9, 0.9, 0.9])})
    assert undefined.since("lost_update_ratio", None, 0.05, below=False) == (5, ", since step 5")


def test_a_run_that_lost_already_and_fell_further_is_told_both():
    lost = [0.3] * 61 + [0.9] * 30
    said = judgement(lost=lost, changes=[Onset(60, 62, 62, 0.8, 0.2)]).headline
    assert said.startswith("Loses 70.0 % of its updates (EDQ 0.800), from the start, more since step 62")
    for slight in (Onset(60, 62, 62, 0.3, 0.2), Onset(60, 62, 62, 0.5, 0.36)):
        assert "more since" not in judgement(lost=lost, changes=[slight]).headline


def test_the_layer_that_a_verdict_names_first_is_the_one_that_loses_the_most():
    """It named the one with the largest updates, and the table beside it the one with the largest loss."""

    rows = (("large.weight", 0.45, 1.0), ("still.weight", 0.0, 0.9), ("well.weight", 1.0, 0.0))
    layers = {name: losing_layer(0.9) | {"edq_ratio": edq, "intended_norm": norm} for name, edq, norm in rows}
    assert "(still.weight, …" in judgement(layers=layers).text


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"edq_ratio": 0.918, "lost_update_ratio": 0.0}, "Loses 8.2 % of its descent (EDQ 0.918)."),
        ({"edq_ratio": 0.08, "lost_update_ratio": 0.9}, "Loses 90.0 % of its updates (EDQ 0.080)."),
        ({"edq_ratio": 0.6, "lost_update_ratio": 0.85}, "Loses 85.0 % of its updates (EDQ 0.600)."),
        # It read "loses −20 % of what its updates intend".
        (
            {"edq_ratio": 1.2, "lost_update_ratio": 0.3, "update_error_ratio": 0.5},
            "Loses 30.0 % of its updates (EDQ 1.200); updates overshoot.",
        ),
        # The share lost counts as arrived what went into a residual: "loses 0.1 %" stood beside "52 % do not move".
        (
            {"residual_zero_ratio": 1.0, "lost_visible_ratio": 0.52, "lost_update_ratio": 0.001, "edq_ratio": 1.0},
            "52.0 % move no weight (EDQ 1.000).",
        ),
    ],
)
def test_a_run_is_told_by_the_number_that_shows_what_it_loses(numbers, said):
    """Updates that all move their weights, but too little, read "loses 0 % of its updates (EDQ 0.918)"."""
    found = judgement({**numbers, "faithful": 1.0})
    assert (found.health, found.headline) == ("losing updates", said)


def test_of_one_step_and_of_a_mean_that_moves_no_interval_is_told():
    model = {**LOSING, "edq_ratio_low": 0.79, "edq_ratio_high": 0.81}
    assert Case(Evidence(model, first_step=1, last_step=9)).interval("edq_ratio") == (0.79, 0.81)
    assert Case(Evidence(model, first_step=9, last_step=9)).interval("edq_ratio") is None
    moved = Evidence(model, first_step=1, last_step=9, now={"edq_ratio": 0.2})
    assert Case(moved).interval("edq_ratio") is None


def test_a_run_of_one_step_is_told_with_that_caution():
    """ "81.8 % of updates are lost, since step 1", with an interval, was said of the first step of a warm-up."""
    found = judgement(last_step=1)
    assert found.headline == "Loses 70.0 % of its updates (EDQ 0.800) in its one measured step."
    unknown = judgement(first_step=None, last_step=None)
    assert unknown.headline == "Loses 70.0 % of its updates (EDQ 0.800).", "of how many is not known"


def test_what_is_not_finite_gets_advice_of_its_own():
    """A run whose loss was NaN was told to try another strategy, which mends no NaN."""
    found = judgement(logged={"loss": 7})
    assert (found.health, found.short) == ("not finite", "loss is not finite")
    assert found.headline == "Loss is not finite, since step 7.", "what it loses beside that helps nobody"
    assert found.advised.startswith("Find the operation that makes the first NaN, then resume from a checkpoint")
    assert "strategy" not in found.advised
