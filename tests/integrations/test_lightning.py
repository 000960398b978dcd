"""The Lightning callback on small real models: what it reports, and that it leaves the training alone."""

import pytest
import torch
from collage_agent.integrations.lightning import CollageCallback
from collage_agent.transport import MemoryTransport
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.trainings import assert_same_training, begun, recorded, scalars_of, steps_of

STEPS = 20

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


class Module(LightningModule):
    """A regression with dropout, which would show a random state that the agent moved."""

    def __init__(self, learning_rate=1e-3, optimizers=1):
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(nn.Linear(12, 80), nn.GELU(), nn.Dropout(0.2), nn.Linear(80, 3))
        self.other = nn.Linear(3, 1)
        self.automatic_optimization = optimizers == 1
        self.losses: list[float] = []

    def loss_of(self, batch):
        (inputs,) = batch
        outputs = self.network(inputs.to(self.network[0].weight.dtype))
        return (self.other(outputs).float() - 1).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(loss)
            first.step()
            if batch_idx % 2:
                second.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self):
        if self.hparams["optimizers"] == 1:
            return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        return [
            torch.optim.AdamW(self.network.parameters(), lr=1e-3),
            torch.optim.SGD(self.other.parameters(), lr=1e-3, momentum=0.9),
        ]


class Keeps(Callback):
    """Keeps the optimizer, which the trainer lets go of."""

    def on_train_end(self, trainer, pl_module):
        self.optimizer = trainer.optimizers[0]


def trained(folder, callback=None, optimizers=1, validated=False, **options):
    seed_everything(5, verbose=False)
    module, keeps = Module(optimizers=optimizers), Keeps()
    inputs = torch.randn(160, 12, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(inputs), batch_size=8, shuffle=True)
    trainer = Trainer(
        max_steps=options.pop("max_steps", STEPS),
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        log_every_n_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keeps, *([callback] if callback else [])],
        **options,
    )
    trainer.fit(module, data, DataLoader(TensorDataset(inputs[:16]), batch_size=8) if validated else None)
    return recorded(module, keeps.optimizer, module.losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "32-true", "gradient_clip_val": 1e-3},
        {"precision": "bf16-true", "gradient_clip_val": 0.01},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "max_steps": 10},
    ],
)
def test_training_is_bit_identical_with_and_without_the_callback(tmp_path, options):
    without = trained(tmp_path, **options)
    callback = CollageCallback(run_options={"mode": "offline"}, every=2, sample="all", oracle=True)
    with_callback = trained(tmp_path, callback, **options)
    assert_same_training(without, with_callback)
    (handle,) = callback.handles
    assert (handle.info.intent, handle.info.door) == ("shadow", "lightning")
    assert handle.summary()["model"]["edq_ratio"] is not None
    if options["precision"] == "32-true":
        assert handle.summary()["model"]["grad_norm"] == pytest.approx(1e-3, rel=1e-3), "the clipped one"


@pytest.mark.slow
def test_the_run_carries_steps_scalars_and_configuration(tmp_path):
    transport = MemoryTransport()
    callback = CollageCallback("bytes", "first", run_options={"transport": transport}, every=10)
    trained(tmp_path, callback, validated=True, val_check_interval=10)
    assert steps_of(transport) == [1, 10, 20]
    scalars = scalars_of(transport)
    assert {step for step, _ in scalars["loss"]} == {5, 10, 15, 20}
    assert {step for step, _ in scalars["validation_loss"]} == {10, 20}
    assert begun(transport).config == {"learning_rate": 1e-3, "optimizers": 1}
    assert begun(transport).name == "first"


@pytest.mark.slow
def test_several_optimizers_are_watched_apart(tmp_path):
    without = trained(tmp_path, optimizers=2)
    callback = CollageCallback(run_options={"mode": "offline"}, every=5)
    with_callback = trained(tmp_path, callback, optimizers=2)
    assert_same_training(without, with_callback)
    first, second = callback.handles
    assert (first.info.optimizer, second.info.optimizer) == ("AdamW", "SGD")
    assert set(second.summary()["layers"]) == {"other.weight", "other.bias"}
