"""The sentence about a run: it counts the layers that the judgement counts."""

from collage_server.queries.headline import beyond_judgement, headline

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
    assert headline(found, evidence).endswith("blocks.0.weight loses most of its own (33.3 % of the elements).")


def test_what_the_model_loses_and_where_most_is_lost_are_two_facts():
    """ "Loses 57.6 % of its updates, in 14 layers" was said of 14 layers that hold 35.7 % of the elements."""

    def layer(lost, elements):
        return {"lost_update_ratio": lost, "update_error_ratio": lost, "intended_norm": 1.0, "elements": elements}

    layers = {f"blocks.{place}.weight": layer(0.9, 10.0) for place in (1, 2, 4)}
    layers |= {f"blocks.{place}.weight": layer(0.4, 30.0) for place in (5, 6)}
    model = {"lost_update_ratio": 0.576, "update_error_ratio": 0.5, "edq_ratio": 0.915, "measured_steps": 30.0}
    evidence = Evidence(model, layers)
    said = headline(judge(evidence), evidence)
    assert "3 of 5 layers lose most of theirs: between 1 and 4, 33.3 % of the elements" in said
    assert "updates, in" not in said
    assert "3 of 5 layers changed then: between 1 and 4" in headline(
        judge(evidence), evidence, since=20, changed=list(layers)[:3]
    )


def test_a_share_of_steps_before_the_change_is_not_said_to_be_lost_since_then():
    """ "Loses 85.9 % of its updates since step 62" was over steps 54 to 120; since step 62 it lost 95 %."""
    model = {"lost_update_ratio": 0.859, "update_error_ratio": 0.5, "edq_ratio": 0.9, "measured_steps": 30.0}
    for first_step, words in ((54, ", more since step 62"), (62, ") since step 62")):
        evidence = Evidence(model, {}, first_step=first_step, last_step=120)
        assert f"{words}" in headline(judge(evidence), evidence, since=62)


def test_the_layer_that_a_verdict_names_first_is_the_one_that_loses_the_most():
    """It named the one with the largest updates, and the table beside it the one with the largest loss."""

    def layer(edq, norm):
        lost = {"lost_update_ratio": 0.9, "update_error_ratio": 0.9}
        return lost | {"edq_ratio": edq, "intended_norm": norm, "elements": 10.0}

    layers = {"large.weight": layer(0.45, 1.0), "still.weight": layer(0.0, 0.9), "well.weight": layer(1.0, 0.0)}
    model = {"lost_update_ratio": 0.7, "update_error_ratio": 0.5, "edq_ratio": 0.4, "measured_steps": 30.0}
    assert "(still.weight, …" in judge(Evidence(model, layers)).text


def test_residuals_that_are_dropped_at_each_step_are_told_by_their_own_number():
    """The share lost counts as arrived what went into a residual; "loses 0.1 %" stood beside "52 % do not move"."""
    text = (
        "100 % of the residuals are 0 before a step: what they kept is dropped, and 52.0 % do not move the weights"
    )
    finding = Finding("losing updates", text, "residual_zero_ratio", 1.0, 0.5)
    found = Judgement("losing updates", "", (finding,))
    said = headline(found, Evidence({"lost_update_ratio": 0.001, "edq_ratio": 1.0}, {}))
    assert said == f"{text}."


def test_a_run_that_loses_by_rounding_few_of_its_updates_away_is_told_by_what_it_loses():
    """Updates that all move their weights, but too little, read "loses 0 % of its updates (EDQ 0.918)"."""

    def said(edq, lost):
        evidence = Evidence({"edq_ratio": edq, "lost_update_ratio": lost, "measured_steps": 30.0}, {})
        return headline(judge(evidence), evidence)

    assert said(0.918, 0.0) == "Loses 8.2 % of what its updates intend (EDQ 0.918)."
    assert said(0.08, 0.9) == "Loses 90.0 % of its updates (EDQ 0.080)."
    assert said(0.6, 0.85) == "Loses 85.0 % of its updates (EDQ 0.600)."


def test_steps_that_overshoot_beside_updates_that_are_lost_are_not_told_as_a_loss():
    """EDQ above 1 beside lost updates read "loses −20 % of what its updates intend"."""
    values = {"edq_window_ratio/8": 1.2, "edq_ratio": 1.2, "lost_update_ratio": 0.3}
    findings = (
        Finding("steps are off", "EDQ over 8 steps is 1.200: updates overshoot", "edq_window_ratio/8", 1.2, 1.02),
        Finding("losing updates", "30.0 % of the updates are rounded away", "lost_update_ratio", 0.3, 0.02),
    )
    said = headline(Judgement("losing updates", "", findings), Evidence(values, {}))
    assert said.endswith("loses 30.0 % of its updates (EDQ 1.200).")


def test_beside_a_verdict_a_headline_says_only_what_that_does_not():
    """An incident's text told at length, and then again, that residuals were dropped."""
    dropped = "100 % of the residuals are 0 before a step: what they kept is dropped"
    verdict = f"{dropped}; the state exp_avg_sq does not decay as it should (0.000). Measured: steps 10 to 170."
    assert (
        beyond_judgement(f"{dropped}; exp_avg_sq stuck since step 10.", verdict)
        == "exp_avg_sq stuck since step 10."
    )
    assert beyond_judgement(f"{dropped}.", verdict) == ""
    assert beyond_judgement("Loses 3 % of its updates.", verdict) == "Loses 3 % of its updates."
