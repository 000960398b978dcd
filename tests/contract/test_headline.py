"""The sentence about a run: it counts the layers that the judgement counts."""

from collage_monitor.headline import headline
from collage_monitor.judgement import Evidence, Finding, Judgement, judge


def test_the_sentence_and_the_reasons_count_the_same_layers():
    """A layer whose many lost updates are next to nothing of what it takes does not count."""

    def layer(error):
        return {"lost_update_ratio": 0.7, "update_error_ratio": error, "intended_norm": 1.0, "elements": 10.0}

    layers = {"blocks.0.weight": layer(0.9), "blocks.1.weight": layer(0.1), "blocks.2.weight": layer(0.2)}
    model = {"lost_update_ratio": 0.7, "update_error_ratio": 0.4, "edq_ratio": 0.8, "measured_steps": 30.0}
    evidence = Evidence(model, layers)
    found = judge(evidence)
    assert "1 layer loses most of its updates (blocks.0.weight" in found.text
    assert "in blocks.0.weight" in headline(found, evidence)


def test_residuals_that_are_dropped_at_each_step_are_told_by_their_own_number():
    """The share lost counts as arrived what went into a residual; "loses 0.1 %" stood beside "52 % do not move"."""
    text = (
        "100 % of the residuals are 0 before a step: what they kept is dropped, and 52.0 % do not move the weights"
    )
    finding = Finding("losing updates", text, "residual_zero_ratio", 1.0, 0.5)
    found = Judgement("losing updates", "", (finding,))
    said = headline(found, Evidence({"lost_update_ratio": 0.001, "edq_ratio": 1.0}, {}))
    assert said == f"{text}."
