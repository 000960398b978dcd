"""What a process finds in which `examples/extension_strategy` is installed."""

import copy
import math
import tempfile
from pathlib import Path

import torch
from collage_agent.audit import audit_checkpoint
from collage_agent.handle import watch
from collage_optim import STRATEGIES, CollageAdamW

from collage_monitor.strategies import strategy
from tests.agent.training import gpt_loss, small_gpt, train
from tests.audit.checkpoints import saved, trained
from tests.optim.models import assert_same_bits, train_each
from tests.reference.adamw import ReferenceAdamW
from tests.reference.streams import noisy_gradients, start_of

NAME = "stochastic-plus"
ELEMENTS, STEPS = 4096, 200


def run():
    """All of it; raises AssertionError where something is not as it should be."""
    assert NAME not in STRATEGIES
    follows_fp64()
    resumes_and_converts()
    is_watched()
    is_audited()


def made(members, name=NAME):
    return CollageAdamW(members, lr=1e-4, strategy=name)


def follows_fp64():
    """The second moment is right to 14 bits, the weights in the mean, where plain storage loses most of the way."""
    start = start_of(ELEMENTS)
    reference = ReferenceAdamW(start, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01)
    members = {name: torch.nn.Parameter(start.clone()) for name in (NAME, "plain")}
    optimizers = {name: made([member], name) for name, member in members.items()}
    for gradient in noisy_gradients(ELEMENTS, STEPS):
        reference.step(gradient)
        for name, member in members.items():
            member.grad = gradient.clone()
            optimizers[name].step()
    state = optimizers[NAME].state[members[NAME]]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "exp_avg_sq_low"}
    second = state["exp_avg_sq"].double() + state["exp_avg_sq_low"].double()
    torch.testing.assert_close(second, reference.second, rtol=2.0**-10, atol=0)
    way = reference.parameter - start.double()
    gone = {name: member.detach().double() - start.double() for name, member in members.items()}
    shares = {name: float(moved @ way / (way @ way)) for name, moved in gone.items()}
    assert math.isclose(shares[NAME], 1, abs_tol=0.02), shares
    assert shares["plain"] < 0.9, shares


def resumes_and_converts():
    model, optimizer = trained(lambda model: made(model.parameters()))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    resumed = made(other.parameters())
    resumed.load_state_dict(checkpoint)
    train_each((optimizer, resumed), 1)
    assert_same_bits(optimizer, resumed)
    converted = made(copy.deepcopy(model).parameters(), "plus")
    converted.load_state_dict(checkpoint)
    for state, original in zip(converted.state.values(), checkpoint["state"].values(), strict=True):
        assert torch.equal(state["exp_avg_sq_low"], original["exp_avg_sq_low"])
        assert not state["parameter_low"].any()


def is_watched():
    model = small_gpt()
    optimizer = CollageAdamW(model.parameters(), lr=2e-4, strategy=NAME)
    handle = watch(model, optimizer, every=10, strategy=NAME, budget=None)
    train(model, optimizer, 30, gpt_loss)
    values, info = handle.summary()["model"], handle.info
    assert (info.intent, info.observed_strategy, info.strategy) == ("rule", NAME, NAME)
    assert abs(values["state_decrement_ratio/exp_avg_sq"] - 1) < 0.02
    assert 0.9 < values["edq_ratio"] < 1.1
    assert info.fingerprint is not None
    assert info.fingerprint.stochastic_rounding is True
    assert "misjudges stochastic rounding" in str(handle)
    assert handle._last is not None
    assert handle._last.scalars["bytes_per_parameter"] == strategy(NAME).bytes_per_parameter == 10


def is_audited():
    with tempfile.TemporaryDirectory() as folder:
        audit = audit_checkpoint(saved(Path(folder) / "it.pt", *trained(lambda model: made(model.parameters()))))
    assert [entry.strategy for entry in audit.kept] == [NAME]
    assert any("rounded stochastically: no update is lost in the mean" in note for note in audit.notes)
    assert "component-missing" not in {finding.code for finding in audit.findings}
