"""Whether a training can learn at all, of how much of it the words speak, and why it stands still."""

from typing import Any

import collage_agent as collage
import pytest
import torch
from collage_agent.handle import watch
from collage_agent.integrations import attach
from torch import nn

from collage_monitor.diagnosis import remedies
from tests.agent.training import mean_square, watched
from tests.diagnosis.test_judgement import GOOD, STATE, judged


def step(model, *optimizers, factor=1.0):
    """The inputs have a gradient, so that there is one where no weight has."""
    (mean_square(model, torch.randn(8, 24, requires_grad=True)) * factor).backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def built(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)).to(dtype)


@pytest.mark.parametrize(("count", "health"), [(5, "unknown"), (200, "not finite")])
def test_steps_that_a_loss_scaler_skips_are_counted_in_words(count, health):
    """Told was "nothing measured yet" after 200 steps, of which none was taken."""
    (model, optimizer, handle), scaler = watched(model=built()), torch.amp.GradScaler("cpu")
    for _ in range(count):
        scaler.scale(model(torch.randn(8, 24)).square().mean() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    words = f"The loss scaler skipped all {count} steps so far, because gradients were not finite."
    found = handle.judgement()
    assert (found.health, found.headline) == (health, words)
    assert found.findings[0].alert == ("CollageNotFinite" if health == "not finite" else "")
    assert words in str(handle)
    assert handle.skipped_so_far == count
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(model(torch.randn(8, 24)).square().mean()).backward()
    scaler.step(optimizer)
    assert handle.skipped_so_far == 0.0
    assert "skipped all" not in str(handle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_0_are_told_where_decay_still_moves_the_weights(dtype):
    """Told was "healthy" in fp32, whose decay arrives, and "losing updates" in bf16, which rounds it away."""
    model, optimizer, handle = watched(model=built(dtype))
    for _ in range(12):
        step(model, optimizer, factor=0.0)
    found = handle.judgement()
    assert found.health == "unknown"
    assert found.headline.startswith("Every gradient was 0 in the measured steps, and the weights move by decay")
    assert any("error_if_nonfinite=True" in advice.text for advice in found.advice)
    for _ in range(8):
        step(model, optimizer)
    assert "gradient was 0" not in handle.judgement().text


@pytest.mark.parametrize("made", [float, torch.tensor])
def test_a_loss_that_is_no_number_is_told_with_its_step(made, tmp_path):
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    collage.init("losses", mode="offline", dir=tmp_path)
    handle = collage.watch(model, optimizer, every=1)
    for number in range(1, 13):
        step(model, optimizer)
        collage.log({"loss": made(float("nan") if number in (3, 8, 9, 10, 11, 12) else 1.0)})
    assert handle.judgement().headline == "Loss is not finite, since step 8."
    collage.log({"loss": made(1.0)})
    assert handle.judgement().health != "not finite"
    collage.log({"loss": "none"})
    assert handle.judgement().health != "not finite"
    collage.finish()


def test_a_layer_that_was_replaced_after_the_optimizer_was_built_is_named():
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model[0] = nn.Linear(24, 24, bias=False)
    handle = watch(model, optimizer, every=1)
    for _ in range(3):
        step(model, optimizer)
    coverage = handle.info.coverage
    assert coverage is not None
    assert (coverage.orphans, coverage.orphaned, coverage.strangers) == (["0.weight"], 576, ["(24, 24)", "(24,)"])
    found = handle.judgement()
    assert found.health == "unknown"
    assert found.headline.startswith("0.weight (576 elements) gets gradients and is in no optimizer")
    assert "build it after layers are replaced" in found.headline


@pytest.mark.parametrize("watched", [True, False])
def test_another_optimizer_is_part_of_what_the_words_speak_of(watched):
    """Told was "100 % of the elements" of a model most of which nobody watched."""
    model = built(torch.bfloat16)
    own, other = (torch.optim.AdamW(layer.parameters(), lr=1e-6) for layer in model)
    if watched:
        watch(model, other)
    handle = watch(model, own, every=1)
    for _ in range(3):
        step(model, own, other)
    found = handle.judgement()
    assert (found.health, found.measured) == (("losing updates", 1.0) if watched else ("losing updates", 0.5))
    assert (handle.info.coverage is None) == watched


def test_optimizers_that_step_their_own_copies_have_no_orphans():
    model = built(torch.bfloat16)
    wide = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(wide, lr=1e-3)
    handle = watch(model, optimizer, every=1)
    mean_square(model, torch.randn(8, 24)).backward()
    for own, parameter in zip(wide, model.parameters(), strict=True):
        own.grad = parameter.grad.float()
    optimizer.step()
    assert handle.info.coverage is None


@pytest.mark.parametrize(("share", "health"), [(0.4, "unknown"), (0.6, "losing updates")])
def test_of_less_than_half_of_the_elements_no_problem_is_that_of_the_run(share, health):
    """Told was a loss of 67 % of the updates, known of 0.9 % of the elements."""
    found = judged({**GOOD, STATE: 1.0, "lost_update_ratio": 0.67, "edq_ratio": 0.4, "measured_ratio": share})
    assert found.health == health
    if health == "unknown":
        assert found.headline.startswith("What was intended is known of 40.0 % of the elements only; ")
        assert "EDQ is 0.400: updates are lost" in found.headline
        assert not found.advice
        assert not any(finding.alert for finding in found.findings)


def test_optimizers_of_one_parameter_each_are_one_watch():
    """Told was of 8 of 20 that all is measured, and 20 equal lines advised."""
    model = built(torch.bfloat16)
    optimizers = [torch.optim.AdamW([parameter], lr=1e-6) for parameter in model.parameters()]
    alone = torch.optim.AdamW([torch.zeros(3, requires_grad=True)])
    found = attach._one_each(model, optimizers[2])
    assert [id(own) for own in found] == [id(own) for own in optimizers]
    assert attach._one_each(model, alone) == [alone]
    handle = watch(model, found, every=1)
    step(model, *reversed(optimizers))
    assert handle.step == 1
    assert len(handle.judgement().advice) == 1
    assert str(handle).count("from_optimizer") == 1


def cut_to_0(model, group):
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0,))
    model[1].requires_grad_(False)


FAULTS = {
    "a layer replaced": (lambda model, group: setattr(model, "0", nn.Linear(24, 24)), remedies.IN_NO_OPTIMIZER),
    "of another model": (lambda model, group: group.update(params=[*built().parameters()]), remedies.OTHERS),
    "frozen": (lambda model, group: model.requires_grad_(False), remedies.NO_GRADIENTS),
    "gradients of 0": (cut_to_0, remedies.ZERO),
    "a rate of 0": (lambda model, group: group.update(lr=0.0), remedies.RATE_0),
}


def at_fault(name):
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    FAULTS[name][0](model, optimizer.param_groups[0])
    return model, optimizer, watch(model, optimizer, every=1)


@pytest.mark.parametrize("door", ["torch", "transformers", "lightning", "accelerate"])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_cause_comes_with_the_line_of_its_framework(fault, door):
    """Told was the cause, and nothing of what to write."""
    model, optimizer, handle = at_fault(fault)
    handle.came_through(door)
    for _ in range(3):
        step(model, optimizer)
    what, lines = remedies.REMEDIES[FAULTS[fault][1]]
    assert handle.judgement().health == "unknown"
    assert [own.text for own in handle.judgement().advice] == [f"{what}: {lines[door]}"]
    assert lines[door] in str(handle)


@pytest.mark.parametrize("fault", [*FAULTS][:3])
def test_the_line_for_a_plain_loop_lets_the_training_learn(fault):
    model, optimizer, handle = at_fault(fault)
    step(model, optimizer)
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "torch": torch}
    exec(handle.judgement().advice[0].text.partition(": ")[2], names)
    optimizer = names["optimizer"]
    handle = watch(model, optimizer, every=1)
    for _ in range(40):
        step(model, optimizer)
    assert handle.judgement().health == "healthy"


def test_the_framework_is_found_in_the_stack_frames():
    """Under `collage-monitor run` no integration attaches."""
    names: dict[str, Any] = {"__name__": "accelerate.optimizer", "step": attach._door}
    exec("def call(): return step()", names)
    outer: dict[str, Any] = {"__name__": "transformers.trainer", "step": names["call"]}
    exec("def call(): return step()", outer)
    assert (attach._door(), names["call"](), outer["call"]()) == ("torch", "accelerate", "transformers")
