"""Lightning: a small model in true bfloat16, watched by one callback.

python examples/lightning_module.py --steps 200
"""

import argparse
import inspect
import warnings

import torch
from collage_agent.integrations.lightning import CollageCallback
from collage_demo.models import compute_products_in_fp32
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 16


class NextByte(LightningModule):
    """Predicts a byte from the CONTEXT bytes before it."""

    def __init__(self, width: int = 64, learning_rate: float = 2e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.Sequential(nn.Linear(CONTEXT * width, 4 * width), nn.GELU(), nn.Linear(4 * width, 256))
        compute_products_in_fp32(self.layers)  # most CPUs multiply bf16 slowly

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch: windows [batch][CONTEXT] and the bytes that follow them."""
        windows, following = batch
        logits = self.layers(self.embedding(windows).flatten(1)).float()
        loss = nn.functional.cross_entropy(logits, following)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as anywhere."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main(arguments: list[str] | None = None) -> None:
    """Train on this machine's copy of a standard-library module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)

    text = torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8).long()
    windows = text.unfold(0, CONTEXT + 1, 1)
    data = DataLoader(TensorDataset(windows[:, :-1], windows[:, -1]), batch_size=16, shuffle=True)
    trainer = Trainer(
        max_steps=options.steps,
        precision="bf16-true",
        accelerator="auto",
        devices=1,
        log_every_n_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CollageCallback("examples", "lightning module")],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer.fit(NextByte(), data)


if __name__ == "__main__":
    main()
