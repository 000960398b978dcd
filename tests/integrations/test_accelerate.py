"""Accelerate: the helper and the tracker in a small loop, and that they leave the training alone."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from collage_agent import current_run
from collage_agent.integrations.accelerate import CollageTracker, watch_accelerated
from collage_agent.transport import MemoryTransport
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.trainings import assert_same_training, begun, recorded, scalars_of, steps_of

BATCHES = 40


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trained(
    tracker=None, *, watched, accumulated=1, mixed_precision="no", dtype=torch.bfloat16, make=torch.optim.AdamW
):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    set_seed(4)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulated,
        mixed_precision=mixed_precision,
        log_with=tracker if tracker else None,
    )
    network = nn.Sequential(nn.Linear(12, 80), nn.GELU(), nn.Dropout(0.2), nn.Linear(80, 3)).to(dtype)
    inputs = torch.randn(8 * BATCHES, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
    data = DataLoader(TensorDataset(inputs), batch_size=8, shuffle=True)
    model, optimizer, data = accelerator.prepare(network, make(network.parameters(), lr=1e-3), data)
    if tracker:
        accelerator.init_trackers("numbers", {"batches": BATCHES})
    handle = (
        watch_accelerated(accelerator, model, optimizer, every=4, sample="all", oracle=True) if watched else None
    )
    losses = []
    for (batch,) in data:
        with accelerator.accumulate(model):
            loss = (model(batch).float() - 1).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if tracker:
            accelerator.log({"loss": losses[-1]})
    accelerator.end_training()
    return handle, recorded(network, optimizer.optimizer, losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"accumulated": 4},
        {"mixed_precision": "bf16", "dtype": torch.float32},
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"make": torch.optim.SGD}, marks=pytest.mark.nightly),
    ],
)
def test_training_is_bit_identical_with_and_without_the_agent(options):
    _, without = trained(watched=False, **options)
    handle, with_agent = trained(CollageTracker(run_options={"mode": "offline"}), watched=True, **options)
    assert_same_training(without, with_agent)
    assert handle is not None
    assert handle.step == BATCHES // options.get("accumulated", 1)
    assert handle.summary()["model"]["edq_ratio"] is not None


@pytest.mark.slow
def test_the_run_carries_steps_scalars_and_configuration():
    transport = MemoryTransport()
    trained(CollageTracker("numbers", "first", run_options={"transport": transport}), watched=True, accumulated=2)
    assert current_run() is None
    assert steps_of(transport) == [1, 4, 8, 12, 16, 20]
    assert max(step for step, _ in scalars_of(transport)["loss"]) == 20
    assert begun(transport).name == "first"
    assert begun(transport).config == {"batches": BATCHES}


def test_what_is_no_accelerator_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"pass the accelerate\.Accelerator"):
        watch_accelerated(None, model, torch.optim.SGD(model.parameters()))
