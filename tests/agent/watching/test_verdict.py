"""The verdict: nobody is called healthy by EDQ alone."""

from __future__ import annotations

from collage_agent.watch import watch
from collage_agent.watching.verdict import verdict

from collage_monitor import wire
from tests.agent.training import mlp, train


def info(**changes):
    return wire.WatchInfo(optimizer="AdamW", observed_strategy="plain", dtype="bfloat16", **changes)


def test_the_words_name_loss_layers_states_grid_and_what_to_try():
    import torch

    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    handle = watch(model, optimizer, every=1, sample="all", oracle=True)
    assert "nothing measured yet" in str(handle)
    train(model, optimizer, 5)
    text = str(handle)
    for words in (
        "AdamW, bfloat16, strategy plain, step 5: losing updates",
        "updates rounded away",
        "furthest from 1: ",
        "state exp_avg_sq: decrements",
        "it hardly decays",
        "against the fp64 oracle",
        "no advice to raise the rate",
        'strategy="plus"',
    ):
        assert words in text
    assert "losing updates" in handle._repr_html_()
    assert "6 layers, at step 5" in repr(handle)


def test_without_a_second_witness_the_words_say_unknown():
    summary = {"step": 3, "model": {"edq_ratio": 1.0}, "layers": {}}
    text = verdict(summary, info())
    assert text.startswith("AdamW, bfloat16, strategy plain, step 3: unknown")
    assert "EDQ alone proves nothing" in text
    assert "healthy" not in text


def test_a_believed_label_stands_beside_the_observed_strategy():
    summary = {"step": 3, "model": {"edq_ratio": 1.0}, "layers": {}}
    text = verdict(summary, info(strategy="stochastic"))
    assert "strategy plain, believed to be stochastic" in text


def test_before_after_claims_nothing():
    summary = {"step": 3, "model": {"edq_ratio": None}, "layers": {}}
    text = verdict(summary, info(intent="before-after", intent_reason="Muon is not elementwise"))
    assert "what was lost is unknown" in text
    assert "Muon is not elementwise" in text
    assert "healthy" not in text


def test_a_window_stands_beside_one_step_and_is_asked_for_where_one_step_misjudges():
    model = {"edq_ratio": 1.0, "lost_update_ratio": 0.5, "lost_window_ratio/64": 0.04}
    summary = {"step": 64, "model": {**model, "lost_visible_window_ratio/64": 0.2}, "layers": {}}
    text = verdict(summary, info(strategy="stochastic"))
    assert "updates rounded away over 64 steps: 4.0%, of those that the forward pass sees 20.0%" in text
    assert "the window above judges it" in text
    del model["lost_window_ratio/64"]
    assert "watch with windows=(64,) to judge it" in verdict(
        {**summary, "model": model}, info(strategy="stochastic")
    )
