"""The verdict: the judgement's word and sentence, the numbers beside them, and what to try."""

from __future__ import annotations

import pytest
import pytorch_optimizer
import torch
from collage_agent import error_guard
from collage_agent.handle import watch
from collage_agent.step.measurer import StepMeasurer
from collage_agent.watching.watch_texts import judgement_text
from collage_optim import CollageAdamW

from collage_monitor import wire
from collage_monitor.diagnosis import Evidence
from tests.agent.training import mlp, train


def told(model, layers=None, **changes):
    info = {"optimizer": "AdamW", "observed_strategy": "plain", "dtype": "bfloat16", **changes}
    return judgement_text(Evidence(model, layers or {}, wire.WatchInfo(**info), 1, 3), {"model": model})


def test_the_words_name_loss_layers_states_grid_and_what_to_try():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    handle = watch(model, optimizer, every=1, sample="all", oracle=True)
    assert "nothing measured yet" in str(handle)
    train(model, optimizer, 5)
    text = str(handle)
    for words in (
        "AdamW, bfloat16, strategy plain, step 5: losing updates",
        "updates rounded away",
        "Measured: steps 1 to 5, 100 % of the elements.",
        "worst layers: ",
        "state exp_avg_sq: decrements",
        "it does not decay as it should",
        "against the fp64 oracle",
        " times too small to change a weight; nine of ten would at ",
        'strategy="split-master") (12 bytes a parameter) or "coupled-8" (8)',
    ):
        assert words in text
    assert handle.judgement().text in text
    assert "losing updates" in handle._repr_html_()
    assert "6 layers, at step 5" in repr(handle)


def test_the_words_quote_the_numbers_that_the_judgement_rests_on():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    handle = watch(model, optimizer, every=1, sample="all")
    train(model, optimizer, 5)
    found, merged = handle.judgement(), handle.evidence().model
    assert found.deciding is not None
    assert found.deciding.value == merged[found.deciding.key]
    assert f"EDQ {merged['edq_ratio']:.4f}" in str(handle)
    # One step is another number.
    assert handle.summary()["model"]["edq_ratio"] != merged["edq_ratio"]


def test_a_share_and_its_interval_are_written_alike():
    """Was "0.02 % (0.0% to 0.0%)"; and how large a copy is was "of the 18,704 of all of it"."""
    lost = {"lost_update_ratio": 0.0002, "lost_update_ratio_low": 0.0001, "lost_update_ratio_high": 0.0003}
    copies = {"cast_sync_ratio/bf16": 0.0784, "cast_sync_bytes/bf16": 1467.0}
    text = told({"edq_ratio": 1.0, **lost, **copies})
    assert "updates rounded away in a step: 0.02 % (0.01 % to 0.03 %)" in text
    assert (
        "sending only what a step changes of a bf16 copy takes 1,467 bytes, 7.8 % of the whole copy (18,712)"
        in text
    )


def test_an_interval_that_does_not_show_in_the_digits_is_left_out():
    """Was "91.5 % (91.5 % to 91.5 %)"."""
    text = told({"edq_ratio": 0.9, "edq_ratio_low": 0.899999, "edq_ratio_high": 0.900001})
    assert "EDQ 0.9000: the share of" in text


def test_without_a_second_witness_the_words_say_unknown():
    text = told({"edq_ratio": 1.0})
    assert text.startswith("AdamW, bfloat16, strategy plain, step 3: unknown")
    assert "EDQ alone proves nothing" in text
    assert "healthy" not in text


def test_a_believed_label_stands_beside_the_observed_strategy():
    assert "strategy plain, believed to be stochastic" in told({"edq_ratio": 1.0}, strategy="stochastic")


def test_before_after_claims_nothing():
    text = told({"elements": 4.0}, intent="before-after", intent_reason="Muon is not elementwise")
    assert "what was lost is unknown" in text
    assert "Muon is not elementwise" in text
    assert "healthy" not in text


def test_a_window_stands_beside_one_step_and_is_asked_for_where_one_step_misjudges():
    model = {"edq_ratio": 1.0, "lost_update_ratio": 0.5, "lost_window_ratio/64": 0.04}
    text = told({**model, "lost_visible_window_ratio/64": 0.2}, strategy="stochastic")
    assert "updates rounded away over 64 steps: 4.0 %, of those that the forward pass sees 20.0 %" in text
    assert "the window above judges it" in text
    del model["lost_window_ratio/64"]
    assert "watch with windows=(64,) to judge it" in told(model, strategy="stochastic")


@pytest.mark.parametrize("resumed", [False, True])
def test_before_the_first_measurement_the_words_say_which_step_it_is(resumed):
    """The next step divisible by `every` was promised, though the first one of a launch is measured."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    taken = 3 if resumed else 0
    train(model, optimizer, taken)
    handle = watch(model, optimizer, every=5)
    assert (
        "nothing measured yet; to be measured: steps divisible by 5 (fewer where they cost too much), "
        "and the first one of this launch"
    ) in str(handle)
    train(model, optimizer, 1, start=taken)
    assert f"step {taken + 1}: " in str(handle)
    train(model, optimizer, 3 - taken, start=taken + 1)
    train(model, optimizer, 1, start=4)
    assert "step 5: " in str(handle)


@pytest.fixture
def _errors_are_swallowed():
    error_guard.raise_in_tests(False)
    yield
    error_guard.raise_in_tests(True)


@pytest.mark.usefixtures("_errors_are_swallowed")
@pytest.mark.parametrize("steps", [1, 5])
def test_measurements_that_fail_say_so_with_the_reason(monkeypatch, steps):
    """Optimizers on which every measurement fails were "nothing measured yet" for ever."""

    def fail(*_):
        raise RuntimeError("expected a projection")

    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    handle = watch(model, optimizer, every=1)
    monkeypatch.setattr(StepMeasurer, "_signature_now", fail)
    train(model, optimizer, steps)
    text = str(handle)
    assert "nothing measured yet" in text
    assert "last looking at the optimizer before a step: RuntimeError: expected a projection" in text
    assert ("switched off after 3 failures" in text) == (steps == 5)


def test_entries_of_the_state_that_are_no_parameters_are_no_failure():
    """SPAM counts its steps beside the parameters' states: every report failed."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer.state["total_step"] = 3  # type: ignore[index]
    handle = watch(model, optimizer, every=1)
    train(model, optimizer, 2)
    assert handle.judgement().health == "losing updates"


@pytest.mark.slow
def test_no_gradient_no_matching_parameter_and_nan_weights_are_three_sentences():
    """All three were "no update was intended"."""
    model, other = mlp(), mlp(1)
    unstepped = torch.optim.AdamW(model.parameters())
    foreign = torch.optim.AdamW(other.parameters())
    handles = [watch(model, unstepped, every=1), watch(model, foreign, every=1)]
    unstepped.step()
    foreign.step()
    texts = [handle.judgement().text for handle in handles]
    assert texts[0].startswith("No watched layer had a gradient")
    assert texts[1].startswith("None of the optimizer's tensors belongs to the model")
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    handle = watch(model, unstepped, every=1)
    train(model, unstepped, 2)
    found = handle.judgement()
    assert found.health == "not finite"
    assert "weights are NaN or infinite" in found.text
    assert all(text in str(handle) for handle, text in zip([handle], [found.text], strict=True))


def test_a_learning_rate_of_0_is_told_from_a_loss():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    handle = watch(model, optimizer, every=1)
    train(model, optimizer, 2)
    assert handle.judgement().text.startswith("The learning rate was 0 in every measured step")


NEAREST, AT_RANDOM = {"strategy": "plain", "lr": 1e-5}, {"strategy": "split-master", "lr": 1e-3}


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("of_one", [True, False], ids=["groups", "optimizers"])
@pytest.mark.parametrize("turned", [False, True])
def test_groups_and_optimizers_that_round_otherwise_are_told_apart(of_one, turned):
    """Rounding at random in one made the other healthy, while it lost 98.8 % of its updates."""
    model = mlp(width=90)
    ways = (AT_RANDOM, NEAREST) if turned else (NEAREST, AT_RANDOM)
    groups = [{"params": list(model[place].parameters()), **way} for place, way in zip((0, 2), ways, strict=True)]
    optimizers = [CollageAdamW(groups)] if of_one else [CollageAdamW([group]) for group in groups]
    handle = watch(model, optimizers, every=1, sample="all", budget=None)
    for step in range(40):
        for optimizer in optimizers:
            train(model, optimizer, 1, start=step)
    seen = handle.info.fingerprint
    assert seen is not None
    nearest = "2" if turned else "0"
    assert seen.stochastic_rounding is None
    assert seen.layer_rounds_at_random == {
        f"{place}.{name}": place != nearest for place in "02" for name in ("weight", "bias")
    }
    found = handle.judgement()
    assert found.health == "losing updates", found.text
    assert found.deciding is not None
    assert found.deciding.value is not None
    assert found.deciding.value > 0.9
    assert "one step misjudges stochastic rounding" in str(handle)


@pytest.mark.slow
def test_layers_that_round_at_random_beside_a_larger_optimizer_are_no_false_alarm():
    """fp32 AdamW, the larger, and a stochastic one: "41 % of the updates are rounded away"."""
    model = mlp(width=90)
    model[2].float()
    optimizers = [
        torch.optim.AdamW(model[2].parameters(), lr=1e-3),
        CollageAdamW([*model[0].parameters(), *model[4].parameters()], lr=1e-5, strategy="stochastic"),
    ]
    handle = watch(model, optimizers, every=1, sample="all", budget=None)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    summary, found = handle.summary(), handle.judgement()
    assert summary["layers"]["4.weight"]["lost_update_ratio"] > 0.5
    assert found.health == "healthy", found.text


def test_optimizers_under_one_watch_are_described_together():
    """What keeps the weights was the largest optimizer's, whatever the others keep."""
    model = mlp()
    optimizers = [
        torch.optim.AdamW(model[2].parameters(), fused=True),
        CollageAdamW([*model[0].parameters(), *model[4].parameters()], strategy="light"),
    ]
    handle = watch(model, optimizers, every=1)
    for optimizer in optimizers:
        train(model, optimizer, 1)
    seen = handle.info.fingerprint
    assert seen is not None
    assert (seen.stochastic_rounding, seen.layer_rounds_at_random) == (False, {})
    assert (seen.residual, seen.master) == ("parameter_low", None)
    assert seen.implementation == "fused and unknown"


def test_states_by_row_and_column_are_told_of_each_optimizer_under_one_watch():
    model = mlp()
    optimizers = [
        torch.optim.AdamW([*model[0].parameters(), *model[4].parameters()]),
        torch.optim.Adafactor(model[2].parameters()),
    ]
    handle = watch(model, optimizers, every=1)
    for optimizer in optimizers:
        train(model, optimizer, 1)
    seen = handle.info.fingerprint
    assert seen is not None
    assert seen.factored == {"row_var": "bfloat16", "col_var": "bfloat16"}
    assert set(seen.states) >= {"exp_avg", "exp_avg_sq"}


def test_where_weights_are_not_understood_no_number_stands_below():
    """ "state exp_avg_sq: decrements 0.000 of the intended ones: it decays as it should" stood there."""
    seen = wire.Fingerprint(unexplained="shift_u (uint8) changes at each step", findings=["it is kept oddly"])
    model = {"edq_ratio": 0.5, "lost_update_ratio": 0.5, "state_decrement_ratio/exp_avg_sq": 0.0}
    head, text, finding = told(model, fingerprint=seen).splitlines()
    assert head.endswith("unknown")
    assert text.startswith("  Shift_u (uint8) changes at each step.")
    assert finding == "  finding: it is kept oddly"


@pytest.mark.parametrize(
    ("decrement", "noise", "words"),
    [
        (0.1, 0.5, "decrements 0.100 of the intended ones: it is off by what chance may do"),
        (1.3, 0.2, "decrements 1.300 of the intended ones: it is off by what chance may do"),
        (0.95, 0.5, "decrements 0.950 of the intended ones: it decays as it should"),
    ],
)
def test_a_state_off_by_what_chance_may_do_does_not_decay_as_it_should(decrement, noise, words):
    state = {"state_decrement_ratio/exp_avg_sq": decrement, "state_decrement_noise_ratio/exp_avg_sq": noise}
    text = told({"edq_ratio": 1.0, **state}, strategy="stochastic")
    assert words in text
    assert ("as it should" in text) == (decrement == 0.95)


def test_steps_that_overshoot_are_told_with_their_cause_and_without_another():
    """An fp16 second moment that is 0 everywhere: "each step keeps what it intends" stood below EDQ 1.908."""
    model = torch.nn.Linear(64, 64).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0)
    handle = watch(model, optimizer, every=1, budget=None)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        for parameter in model.parameters():
            parameter.grad = (1e-3 * torch.randn(parameter.shape, generator=generator)).half()
        optimizer.step()
    text = str(handle)
    assert "steps are off\n  Updates overshoot, from the start.\n  EDQ is " in text
    assert "updates overshoot" in text
    assert "each step keeps what it intends" not in text
    # All of it, but in the first step, whose states are not there before it.
    assert "state exp_avg_sq: 95.0 % of it is 0 where the gradient is not: it underflows as float16" in text
    assert "state exp_avg:" in text
    assert "state exp_avg: 0" not in text


def test_a_state_in_32_bits_that_stays_0_is_not_said_to_underflow():
    model = torch.nn.Linear(8, 8)
    optimizer = pytorch_optimizer.SM3(model.parameters())
    handle = watch(model, optimizer, every=1, budget=None)
    for _ in range(4):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    assert "of it is 0 where the gradient is not\n" in str(handle)


@pytest.mark.parametrize(
    "off", [{"edq_oracle_ratio": 0.7}, {"edq_oracle_ratio": 1.0, "state_decrement_ratio/exp_avg": 1.6}]
)
def test_steps_off_by_the_oracle_or_a_state_keep_what_they_intend(off):
    text = told({"edq_ratio": 1.0, **off})
    assert "steps are off" in text
    assert "each step keeps what it intends, but not what fp64 would do" in text


def test_how_many_times_too_small_an_update_is_has_two_digits_and_no_exponent():
    texts = [
        told({"edq_ratio": 0.1, "half_ulp_margin": margin, "half_ulp_lr_factor": 996.0})
        for margin in (-6.8, 0.8, -30.0)
    ]
    assert [
        text[text.index("the typical update is") :].split(" times ")[0].rpartition(" ")[2] for text in texts
    ] == ["110", "1.7", "1.1e+09"]
    assert "would at 1,000 times the learning rate" in texts[0]
