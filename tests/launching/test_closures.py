"""Steps that take a closure, as Lightning's do: measured as others are where one evaluation leads to the step."""

import pytest
import torch
from collage_agent.handle import watch

from tests.agent.training import mlp, mlp_loss
from tests.integrations.identity import assert_same_training, recorded

STEPS = 12


def trained(make, *, closure, watched, positional=False, dtype=torch.bfloat16):
    model = mlp(dtype=dtype)
    optimizer = make(model.parameters())
    handle = watch(model, optimizer, every=3, sample="all", oracle=True) if watched else None
    losses = []
    for step in range(STEPS):

        def evaluate(step=step):
            optimizer.zero_grad()
            loss = mlp_loss(model, step)
            loss.backward()
            return loss

        if not closure:
            evaluate()
            optimizer.step()
            continue
        loss = optimizer.step(evaluate) if positional else optimizer.step(closure=evaluate)
        losses.append(float(loss.detach()))
    return handle, recorded(model, optimizer, losses)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("positional", [True, False])
def test_a_closure_changes_no_number(positional):
    plain, _ = trained(adamw, closure=False, watched=True)
    closed, _ = trained(adamw, closure=True, watched=True, positional=positional)
    assert plain is not None
    assert closed is not None
    assert closed.info.intent == plain.info.intent == "shadow"
    assert closed.summary() == plain.summary()
    assert closed.summary()["model"]["edq_ratio"] is not None


def test_a_closure_is_left_as_it_is():
    _, without = trained(adamw, closure=True, watched=False)
    _, with_agent = trained(adamw, closure=True, watched=True)
    assert_same_training(without, with_agent)


def test_a_closure_that_is_evaluated_again_leaves_only_what_changed():
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    _, without = trained(lbfgs, closure=True, watched=False, dtype=torch.float32)
    handle, with_agent = trained(lbfgs, closure=True, watched=True, dtype=torch.float32)
    assert_same_training(without, with_agent)
    assert handle is not None
    assert handle.info.intent == "before-after"
    assert "repeatedly" in handle.info.intent_reason
    values = handle.summary()["model"]
    assert values["effective_norm"] > 0
    assert values["unchanged_ratio"] < 1
    for key in ("edq_ratio", "lost_update_ratio", "grad_norm", "intended_norm"):
        assert values.get(key) is None
    assert not any(key.startswith(("state_zero", "decay", "residual")) for key in values)
    assert "unknown" in str(handle)
