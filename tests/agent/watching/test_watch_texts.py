"""The verdict: the judgement's word and sentence, the numbers beside them, and what to try. Printing never raises:
what holds no numbers is said to hold none."""

import logging
from functools import partial
from typing import Any

import collage_agent as collage
import pytest
import pytorch_optimizer
import torch
from collage_agent import error_guard
from collage_agent.handle import watch
from collage_agent.step.measurer import StepMeasurer
from collage_agent.watching.watch_texts import judgement_text
from collage_optim import CollageAdamW
from torch import nn

from collage_monitor import wire
from collage_monitor.diagnosis import Evidence
from tests.agent.training import adamw, mean_square, mlp, train, watched

META = "on the meta device, which holds no numbers"


def told(model, layers=None, **changes):
    info = {"optimizer": "AdamW", "observed_strategy": "plain", "dtype": "bfloat16", **changes}
    return judgement_text(Evidence(model, layers or {}, wire.WatchInfo(**info), 1, 3), {"model": model})


def test_the_words_name_loss_layers_states_grid_and_what_to_try_and_quote_what_the_judgement_rests_on():
    model, optimizer, handle = watched(partial(adamw, lr=1e-4), sample="all", oracle=True)
    assert "nothing measured yet" in str(handle)
    train(model, optimizer, 5)
    text, found, merged = str(handle), handle.judgement(), handle.evidence().model
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
        f"EDQ {merged['edq_ratio']:.4f}",
        found.text,
    ):
        assert words in text
    assert "losing updates" in handle._repr_html_()
    assert "6 layers, at step 5" in repr(handle)
    assert found.deciding.value == merged[found.deciding.key]
    # One step is another number.
    assert handle.summary()["model"]["edq_ratio"] != merged["edq_ratio"]


STATE, RATIO = "exp_avg_sq", "state_decrement_ratio/exp_avg_sq"
LOST = {"lost_update_ratio": 0.0002, "lost_update_ratio_low": 0.0001, "lost_update_ratio_high": 0.0003}
COPIES = {"cast_sync_ratio/bf16": 0.0784, "cast_sync_bytes/bf16": 1467.0}
AT_RANDOM = {"strategy": "stochastic"}
BY_CHANCE = "it is off by what chance may do"
HALF_LOST = {"edq_ratio": 1.0, "lost_update_ratio": 0.5}
WORDS = {
    "share and interval": ({"edq_ratio": 1.0, **LOST}, {}, ["in a step: 0.02 % (0.01 % to 0.03 %)"], []),
    "a copy's bytes": (
        {"edq_ratio": 1.0, **COPIES},
        {},
        ["takes 1,467 bytes, 7.8 % of the whole copy (18,712)"],
        [],
    ),
    "no digit of an interval": (
        {"edq_ratio": 0.9, "edq_ratio_low": 0.899999, "edq_ratio_high": 0.900001},
        {},
        ["EDQ 0.9000: the share of"],
        [],
    ),
    "no second witness": ({"edq_ratio": 1.0}, {}, ["step 3: unknown", "EDQ alone proves nothing"], ["healthy"]),
    "a label": ({"edq_ratio": 1.0}, AT_RANDOM, ["strategy plain, believed to be stochastic"], []),
    "before and after": (
        {"elements": 4.0},
        {"intent": "before-after", "intent_reason": "Muon is not elementwise"},
        ["what was lost is unknown", "Muon is not elementwise"],
        ["healthy"],
    ),
    "a window": (
        {**HALF_LOST, "lost_window_ratio/64": 0.04, "lost_visible_window_ratio/64": 0.2},
        AT_RANDOM,
        ["over 64 steps: 4.0 %, of those that the forward pass sees 20.0 %", "the window above judges it"],
        [],
    ),
    "no window": (HALF_LOST, AT_RANDOM, ["watch with windows=(64,) to judge it"], []),
    **{
        f"a state at {ratio}, noise {noise}": (
            {"edq_ratio": 1.0, RATIO: ratio, f"state_decrement_noise_ratio/{STATE}": noise},
            AT_RANDOM,
            [f"decrements {ratio:.3f} of the intended ones: {word}"],
            [other],
        )
        for ratio, noise, word, other in (
            (0.1, 0.5, BY_CHANCE, "as it should"),
            (1.3, 0.2, BY_CHANCE, "as it should"),
            (0.95, 0.5, "it decays as it should", BY_CHANCE),
        )
    },
    **{
        f"off by {[*off]}": ({"edq_ratio": 1.0, **off}, {}, ["steps are off", "but not what fp64 would do"], [])
        for off in ({"edq_oracle_ratio": 0.7}, {"edq_oracle_ratio": 1.0, "state_decrement_ratio/exp_avg": 1.6})
    },
}


@pytest.mark.parametrize("name", WORDS)
def test_each_number_has_its_words(name):
    model, changes, said, unsaid = WORDS[name]
    text = told(model, **changes)
    assert [words for words in said if words not in text] == [], text
    assert [words for words in unsaid if words in text] == [], text


def test_where_weights_are_not_understood_no_number_stands_below():
    """ "state exp_avg_sq: decrements 0.000 of the intended ones: it decays as it should" stood there."""
    seen = wire.Fingerprint(unexplained="shift_u (uint8) changes at each step", findings=["it is kept oddly"])
    head, text, finding = told(
        {"edq_ratio": 0.5, "lost_update_ratio": 0.5, RATIO: 0.0}, fingerprint=seen
    ).splitlines()
    assert head.endswith("unknown")
    assert text.startswith("  Shift_u (uint8) changes at each step.")
    assert finding == "  finding: it is kept oddly"


def test_how_many_times_too_small_an_update_is_has_two_digits_and_no_exponent():
    for margin, times in ((-6.8, "110"), (0.8, "1.7"), (-30.0, "1.1e+09")):
        text = told({"edq_ratio": 0.1, "half_ulp_margin": margin, "half_ulp_lr_factor": 996.0})
        assert text[text.index("the typical update is") :].split(" times ")[0].rpartition(" ")[2] == times
        assert "would at 1,000 times the learning rate" in text


@pytest.mark.parametrize("resumed", [False, True])
def test_before_the_first_measurement_the_words_say_which_step_it_is(resumed):
    """The next step divisible by `every` was promised, though the first one of a launch is measured."""
    model, taken = mlp(), 3 if resumed else 0
    optimizer = adamw(model.parameters(), lr=1e-4)
    train(model, optimizer, taken)
    handle = watch(model, optimizer, every=5)
    assert "to be measured: steps divisible by 5 (fewer where they cost too much), and the first one" in str(handle)
    train(model, optimizer, 1, start=taken)
    assert f"step {taken + 1}: " in str(handle)
    train(model, optimizer, 4 - taken, start=taken + 1)
    assert "step 5: " in str(handle)


@pytest.mark.parametrize("steps", [1, 5])
def test_measurements_that_fail_say_so_with_the_reason(monkeypatch, steps):
    """Optimizers on which every measurement fails were "nothing measured yet" for ever."""

    def fail(*_):
        raise RuntimeError("expected a projection")

    error_guard.raise_in_tests(False)
    model, optimizer, handle = watched()
    monkeypatch.setattr(StepMeasurer, "_signature_now", fail)
    train(model, optimizer, steps)
    text = str(handle)
    assert "nothing measured yet" in text
    assert "last looking at the optimizer before a step: RuntimeError: expected a projection" in text
    assert ("switched off after 3 failures" in text) == (steps == 5)


def test_entries_of_the_state_that_are_no_parameters_are_no_failure():
    """SPAM counts its steps beside the parameters' states: every report failed."""
    model, optimizer, handle = watched(partial(adamw, lr=1e-4))
    optimizer.state["total_step"] = 3
    train(model, optimizer, 2)
    assert handle.judgement().health == "losing updates"


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("of_one", [True, False], ids=["groups", "optimizers"])
@pytest.mark.parametrize("turned", [False, True])
def test_groups_and_optimizers_that_round_otherwise_are_told_apart(of_one, turned):
    """Rounding at random in one made the other healthy, while it lost 98.8 % of its updates."""
    model = mlp(width=90)
    at_random, nearest = ("0", "2") if turned else ("2", "0")
    groups: list[dict[str, Any]] = [
        {"params": list(model[int(at_random)].parameters()), "strategy": "split-master", "lr": 1e-3},
        {"params": list(model[int(nearest)].parameters()), "strategy": "plain", "lr": 1e-5},
    ]
    groups.sort(key=lambda group: group["params"][0] is not model[0].weight)
    optimizers = [CollageAdamW(groups)] if of_one else [CollageAdamW([group]) for group in groups]
    handle: Any = watch(model, optimizers, every=1, sample="all", budget=None)
    for step in range(40):
        for optimizer in optimizers:
            train(model, optimizer, 1, start=step)
    seen, found = handle.info.fingerprint, handle.judgement()
    assert (seen.stochastic_rounding, seen.layer_rounds_at_random) == (
        None,
        {f"{place}.{name}": place != nearest for place in "02" for name in ("weight", "bias")},
    )
    assert found.health == "losing updates", found.text
    assert found.deciding.value > 0.9
    assert "one step misjudges stochastic rounding" in str(handle)


@pytest.mark.parametrize(
    ("of_layer_2", "of_the_others", "seen"),
    [
        (
            partial(torch.optim.AdamW, fused=True),
            partial(CollageAdamW, strategy="light"),
            {
                "stochastic_rounding": False,
                "layer_rounds_at_random": {},
                "residual": "parameter_low",
                "master": None,
            }
            | {"implementation": "fused and unknown", "factored": {}},
        ),
        (torch.optim.Adafactor, torch.optim.AdamW, {"factored": {"row_var": "bfloat16", "col_var": "bfloat16"}}),
    ],
    ids=["a residual", "states by row and column"],
)
def test_optimizers_under_one_watch_are_described_together(of_layer_2, of_the_others, seen):
    """What keeps the weights was the largest optimizer's, whatever the others keep."""
    model = mlp()
    optimizers = [
        of_layer_2(model[2].parameters()),
        of_the_others([*model[0].parameters(), *model[4].parameters()]),
    ]
    handle: Any = watch(model, optimizers, every=1)
    for optimizer in optimizers:
        train(model, optimizer, 1)
    assert {key: getattr(handle.info.fingerprint, key) for key in seen} == seen
    assert set(handle.info.fingerprint.states) >= {"exp_avg", "exp_avg_sq"}


def test_steps_that_overshoot_are_told_with_their_cause_and_without_another():
    """An fp16 second moment that is 0 everywhere: "each step keeps what it intends" stood below EDQ 1.908."""
    model, optimizer, handle = watched(partial(adamw, eps=1e-4, weight_decay=0), nn.Linear(64, 64).half())
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
    layer = nn.Linear(8, 8)
    _, _, handle = watched(pytorch_optimizer.SM3, layer, 4, lambda own, _: mean_square(own, torch.ones(2, 8)))
    assert "of it is 0 where the gradient is not\n" in str(handle)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def stacked(*devices, dtype=None):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, device=device, dtype=dtype) for device in devices))


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def all_said(handle):
    """Everything that a user may print."""
    assert handle._repr_html_()
    assert repr(handle)
    assert handle.judgement().text
    return str(handle), handle.summary()


@pytest.mark.parametrize(
    "options", [{}, {"oracle": True}, {"windows": (2,)}, {"expect": {"min_edq": 0.9}}], ids=str
)
@pytest.mark.parametrize("make", [sgd, torch.optim.AdamW, partial(CollageAdamW, lr=1e-3, strategy="plain")])
def test_a_model_on_the_meta_device_is_watched_and_printed(make, options):
    model, optimizer, handle = watched(make, stacked("meta", "meta", dtype=torch.bfloat16), **options)
    assert f"4 tensors {META}" in str(handle)
    for _ in range(3):
        step(model, optimizer)
    said, summary = all_said(handle)
    assert "The optimizer steps no watched layer that can be measured." in said
    assert f"left out: 4 tensors {META}" in said
    assert not any(summary["model"][key] for key in ("elements", "edq_ratio"))


@pytest.mark.parametrize("devices", [("meta", "cpu"), ("cpu", "meta")])
@pytest.mark.parametrize("oracle", [False, True])
def test_beside_tensors_on_the_meta_device_the_others_are_measured(devices, oracle):
    model, optimizer, handle = watched(sgd, stacked(*devices), oracle=oracle)
    for _ in range(3):
        step(model, optimizer)
    said, summary = all_said(handle)
    assert f"left out: 2 tensors {META}" in said
    assert summary["model"]["edq_ratio"] == pytest.approx(1, abs=1e-3)
    assert summary["model"]["elements"] == 72
    assert summary["layers"][f"{devices.index('cpu')}.weight"]["edq_ratio"] is not None
    assert summary["layers"][f"{devices.index('meta')}.weight"]["edq_ratio"] is None


def test_tensors_that_come_from_the_meta_device_in_place_are_measured_from_then_on():
    """As DTensors do in `to_empty`."""
    model, optimizer, handle = watched(sgd, stacked("meta"))
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.zeros_like(parameter, device="cpu")))
    step(model, optimizer)
    said, summary = all_said(handle)
    assert META not in said
    assert summary["model"]["elements"] == 72


CHANGES = {
    "replaced": lambda model, optimizer: setattr(model[0], "weight", nn.Parameter(torch.ones(8, 8))),
    "deleted": lambda model, optimizer: delattr(model[0], "weight"),
    "loosened": lambda model, optimizer: optimizer.param_groups.clear(),
    "without states": lambda model, optimizer: optimizer.state.clear(),
    "freed": lambda model, optimizer: [own.untyped_storage().resize_(0) for own in model.parameters()],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [0, 2])
def test_what_happens_to_the_model_takes_nothing_from_what_was_measured(change, steps):
    model, optimizer, handle = watched(sgd, stacked("cpu"))
    for _ in range(steps):
        step(model, optimizer)
    CHANGES[change](model, optimizer)
    for _ in range(2):
        said, summary = all_said(handle)
        assert "nothing measured yet" in said if not steps else "Measured: steps 1 to 2" in said
        assert summary["step"] == (steps or None)
        handle.remove()


def test_a_run_ends_with_its_address_whatever_it_watched(tmp_path, capsys):
    collage.init(mode="offline", dir=tmp_path)
    model = stacked("meta", "cpu")
    optimizer = sgd(model.parameters())
    handle = collage.watch(model, optimizer, every=1, budget=None)
    step(model, optimizer)
    collage.finish()
    printed = capsys.readouterr().out
    assert f"left out: 2 tensors {META}" in printed
    assert "1 report waits in" in printed
    assert all_said(handle)[0] in printed


def test_what_cannot_be_read_is_said_once_and_measuring_goes_on(monkeypatch, caplog):
    error_guard.raise_in_tests(False)
    model, optimizer, handle = watched(sgd, stacked("cpu"))
    step(model, optimizer)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "collage_agent"):
        patch.setattr(torch.Tensor, "numpy", lambda tensor: tensor.no_such_thing)
        for _ in range(5):
            assert str(handle) == "step 1: what was measured cannot be read; the log of collage_agent says why"
            assert handle.summary() == {"step": 1, "model": {}, "layers": {}}
    assert len([record for record in caplog.records if "no_such_thing" in record.message]) == 1
    step(model, optimizer)
    assert handle.summary()["step"] == 2
    assert "Measured: steps 1 to 2" in str(handle)


def test_nor_does_an_average_raise_whose_numbers_cannot_be_read(monkeypatch):
    error_guard.raise_in_tests(False)
    model = stacked("cpu")
    average = torch.optim.swa_utils.AveragedModel(model)
    handle = collage.watch_average(average, model, every=1)
    for _ in range(3):
        average.update_parameters(model)
    assert handle.summary()["layers"]
    monkeypatch.setattr(torch.Tensor, "numpy", lambda tensor: tensor.no_such_thing)
    assert handle.summary()["layers"] == {}
    assert str(handle).startswith("average of the weights (AveragedModel")
