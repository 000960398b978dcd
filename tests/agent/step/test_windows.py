"""Windows of real runs against whole tensors re-run in fp64, and the bursts that are given up."""

import collections
from functools import partial

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.step.windows import Windows, WindowSchedule
from collage_optim import CollageAdamW

from tests.agent.step.test_measurer import totals_of
from tests.agent.training import adamw, backward, mlp, mlp_loss, train, watched
from tests.reference import diagnostics
from tests.reference.adamw import ReferenceAdamW
from tests.reference.intended import full_precision_update

pytestmark = pytest.mark.slow

CYCLE = 16
"""Windows of 2 and 4 steps, every step measured: they end every 8 and 16 steps, together at the sixteenth."""


def test_a_burst_ends_at_a_measured_step_and_takes_a_quarter_of_the_steps():
    schedule = WindowSchedule((8, 64), 10)
    assert schedule.cycle == 260
    spans = [span for step in range(1, 521) for span in schedule.covering(step, 0)]
    assert {span.end for span in spans if span.length == 64} == {260, 520}
    assert {span.end % 40 for span in spans if span.length == 8} == {0}
    assert sum(span.length == 64 for span in spans) == 128
    assert schedule.covering(192, 0) == []
    assert [(span.begin, span.end) for span in schedule.covering(197, 0)] == [(192, 200), (196, 260)]
    doubled = [span for step in range(1, 1041) for span in schedule.covering(step, 1)]
    assert {span.end for span in doubled if span.length == 64} == {520, 1040}


def reference_update(optimizer):
    """u of each parameter by id, of torch's AdamW or of our pairs, from the stored state."""
    if not isinstance(optimizer, CollageAdamW):
        return {key: u.flatten() for key, u in full_precision_update(optimizer).items()}
    found = {}
    group = optimizer.param_groups[0]
    for p in group["params"]:
        state = optimizer.state[p]
        reference = ReferenceAdamW(p, group["lr"], group["betas"], group["eps"], group["weight_decay"])
        reference.parameter = optimizer.stored_parameter(p)
        reference.first, reference.second = state["exp_avg"].double(), state["exp_avg_sq"].double()
        reference.steps = int(state["step"])
        found[id(p)] = reference.step(p.grad).flatten()
    return found


def stored(optimizer, p):
    kept = optimizer.stored_parameter(p) if isinstance(optimizer, CollageAdamW) else p.detach().double()
    return diagnostics.exact(kept.flatten().clone())


@pytest.mark.parametrize(
    "make",
    [partial(adamw, lr=3e-4, weight_decay=0.1), partial(CollageAdamW, lr=3e-4, weight_decay=0.1, strategy="light")],
    ids=["plain", "light"],
)
def test_windows_of_whole_tensors_equal_a_full_fp64_run(make):
    model, optimizer, handle = watched(make, mlp(width=24), sample="all", windows=(2, 4))
    updates, ends, visible = (collections.defaultdict(list) for _ in range(3))
    for step in range(CYCLE):
        backward(model, step)
        if step >= CYCLE - 4:
            found = reference_update(optimizer)
            for name, p in model.named_parameters():
                updates[name].append(diagnostics.exact(found[id(p)]))
                ends[name].append(stored(optimizer, p))
                visible[name].append(diagnostics.exact(p.detach().flatten()))
        optimizer.step()
    named = dict(model.named_parameters())
    for layer, totals in totals_of(handle).items():
        for length in (2, 4):
            end, seen = stored(optimizer, named[layer]), diagnostics.exact(named[layer].detach().flatten())
            expected = diagnostics.window(updates[layer][-length:], ends[layer][-length], end)
            shown = diagnostics.window(updates[layer][-length:], visible[layer][-length], seen)
            assert totals[f"window_active/{length}"] == expected["active"]
            assert totals[f"window_lost/{length}"] == expected["lost"]
            assert totals[f"window_lost_visible/{length}"] == shown["lost"]
            for name, value in (
                ("intended_squared", expected["intended_squared"]),
                ("intended_effective", expected["product"]),
                ("effective_squared", expected["effective_squared"]),
                ("intended_visible", shown["product"]),
            ):
                assert totals[f"window_{name}_sum/{length}"] == pytest.approx(float(value), rel=1e-9)
    values = handle.summary()["model"]
    assert 0 < values["lost_visible_window_ratio/4"] < values["lost_visible_window_ratio/2"]
    if isinstance(optimizer, CollageAdamW):
        assert values["edq_window_ratio/4"] == pytest.approx(1.0, abs=0.01)
        assert values["lost_window_ratio/4"] < 0.01


def run(spoil, at=CYCLE - 1):
    """The window's EDQ after a cycle, with `spoil(model, optimizer)` just before step number `at`."""
    model, optimizer, handle = watched(sample=1024, windows=(4,))
    for step in range(CYCLE):
        backward(model, step)
        if step + 1 == at:
            spoil(model, optimizer)
        optimizer.step()
    return handle.summary()["model"].get("edq_window_ratio/4")


SPOILT = {
    "load": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "write": lambda model, optimizer: model.load_state_dict({k: 1.01 * v for k, v in model.state_dict().items()}),
    "poison": lambda model, optimizer: model[0].weight.grad[0].fill_(torch.nan),
    "freeze": lambda model, optimizer: setattr(model[2].bias, "grad", None),
    "nothing": lambda model, optimizer: None,
}


@pytest.mark.parametrize("way", SPOILT)
def test_a_spoilt_burst_is_not_reported_and_one_spoilt_before_it_began_is_none(way):
    assert (run(SPOILT[way]) is None) == (way != "nothing")
    if way != "poison":
        assert run(SPOILT[way], at=CYCLE - 6) is not None


def test_a_tensor_that_a_counter_on_a_device_shows_to_be_out_of_step_spoils_the_burst(monkeypatch):
    def spoil(*_):
        first = "collage_agent.step.bucket.out_of_lock_step"
        monkeypatch.setattr(first, lambda states: torch.arange(len(states)) == 0)

    assert run(spoil) is None


def test_a_step_that_the_loss_scaler_skips_spoils_the_burst():
    make = partial(adamw, fused=True)
    model, optimizer, handle = watched(make, mlp(dtype=torch.float32), sample="all", windows=(4,))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    seen = {}
    for step in range(2 * CYCLE):
        optimizer.zero_grad()
        scaler.scale(mlp_loss(model, step)).backward()
        if step == CYCLE - 2:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        seen[step + 1] = handle.summary()["model"].get("edq_window_ratio/4")
    assert seen[CYCLE] is None
    assert seen[2 * CYCLE] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("skips", [False, True])
def test_a_skipped_step_spoils_the_burst_also_if_the_sample_is_finite(skips):
    """The verdict is the scaler's, which sees gradients beyond the sample and on other ranks."""
    make = partial(adamw, fused=True)
    model, optimizer, handle = watched(make, mlp(dtype=torch.float32), sample="all", windows=(4,))
    optimizer.grad_scale = torch.tensor(1.0)
    for step in range(CYCLE):
        backward(model, step)
        optimizer.found_inf = torch.tensor(float(skips and step == CYCLE - 2))
        optimizer.step()
    assert (handle.summary()["model"].get("edq_window_ratio/4") is None) == skips


@pytest.mark.parametrize(("missing", "is_open"), [(0, True), (1, False)])
def test_a_step_that_is_missing_closes_what_is_open(missing, is_open):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows = Windows((4,), 1)
    first = next(step for step in range(1, 100) if windows.schedule.covering(step, 0))
    for step in (first - 1, first, first + 1 + missing):
        windows.before(optimizer, step, 0, "alike", list)
    assert windows.is_open == is_open


def test_windows_are_reported_at_their_ends_only():
    _, _, handle = watched(every=2, windows=(3,), steps=20)
    assert totals_of(handle)["0.weight"]["window_active/3"] != totals_of(handle)["0.weight"]["window_active/3"]
    assert handle.summary()["step"] == 20
    assert 0 < handle.summary()["model"]["edq_window_ratio/3"] < 2
    assert 0 < handle.summary()["layers"]["2.weight"]["edq_window_ratio/3"] < 2


def test_a_larger_step_shows_in_windows_of_a_sample_too():
    make = partial(adamw, lr=3e-4)
    model, optimizer, sampled = watched(make, mlp(width=130), sample=1024, windows=(4,))
    whole = watch(model, optimizer, every=1, sample="all", windows=(4,))
    train(model, optimizer, CYCLE)
    few, all_of_them = sampled.summary()["model"], whole.summary()["model"]
    for key in ("edq_window_ratio/4", "edq_window_cosine/4", "lost_window_ratio/4"):
        assert few[key] == pytest.approx(all_of_them[key], abs=0.05)
        assert few[key] != all_of_them[key]


@pytest.mark.parametrize("window", [2, 4])
def test_windows_that_end_together_do_not_disturb_each_other(window):
    def at_the_end(*windows):
        make = partial(CollageAdamW, lr=1e-2, strategy="split-master", seed=3)
        _, _, handle = watched(make, windows=windows, steps=CYCLE)
        return [
            (layer, key, float(value))
            for layer, totals in totals_of(handle).items()
            for key, value in totals.items()
            if key.startswith("window_") and key.endswith(f"/{window}")
        ]

    alone = at_the_end(window)
    assert alone
    assert at_the_end(2, 4) == alone
