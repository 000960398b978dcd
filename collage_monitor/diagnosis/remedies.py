"""Why a training does not learn: the line to paste against each cause, by the framework that runs the loop.

`doubts.py` and `weights.py` find the causes, `advice.py` quotes the lines; docs/how-to/training-does-not-learn.md
has them as a table (`tests/docs/test_does_not_learn.py`, which also holds their names to the frameworks').
"""

from __future__ import annotations

from typing import Final

from collage_monitor.wire import Advice, Door, Finding

__all__ = ["IN_NO_OPTIMIZER", "LOSS", "NO_GRADIENTS", "OTHERS", "RATE_0", "REMEDIES", "SKIPPED", "ZERO", "remedy"]

IN_NO_OPTIMIZER: Final = "is in no optimizer"
OTHERS: Final = "another model's optimizer"
NO_GRADIENTS: Final = "no gradients"
ZERO: Final = "every gradient is 0"
RATE_0: Final = "the learning rate is 0"
SKIPPED: Final = "every step was skipped"
LOSS: Final = "is not finite"
"""How the short words of a finding end, by cause."""
_BUILD: Final[dict[Door, str]] = {
    "torch": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "transformers": "trainer.optimizer = trainer.lr_scheduler = None",
    "lightning": "return torch.optim.AdamW(self.parameters(), lr=1e-3)",
    "accelerate": "model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))",
}
REMEDIES: Final[dict[str, tuple[str, dict[Door, str]]]] = {
    IN_NO_OPTIMIZER: (
        "build the optimizer again, after the last change of the model and before it is watched",
        _BUILD,
    ),
    OTHERS: ("build the optimizer again, from the parameters of the model that is trained", _BUILD),
    NO_GRADIENTS: (
        "let the weights have gradients, and compute the loss from the model's own output, outside torch.no_grad()",
        {
            "torch": "model.requires_grad_(True)",
            "transformers": "trainer.model.requires_grad_(True)",
            "lightning": "self.requires_grad_(True)",
            "accelerate": "accelerator.unwrap_model(model).requires_grad_(True)",
        },
    ),
    ZERO: (
        "enter torch.autocast anew in each step, and see whether clipping divides by a norm that is not finite",
        {
            "torch": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)",
            "transformers": "trainer.args.max_grad_norm = 0.0",
            "lightning": "trainer = Trainer(gradient_clip_val=None, detect_anomaly=True)",
            "accelerate": 'print(accelerator.clip_grad_norm_(model.parameters(), float("inf")))',
        },
    ),
    RATE_0: (
        "build the scheduler from the optimizer that trains, and let each step move it",
        {
            "torch": "scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=100)",
            "transformers": "trainer.lr_scheduler = None",
            "lightning": 'return [optimizer], [{"scheduler": scheduler, "interval": "step"}]',
            "accelerate": "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
        },
    ),
    SKIPPED: (
        "log the loss: if it is not finite, the model's input or output is not; if it is, float16 overflows in the "
        "backward pass, and bfloat16 needs no scaler",
        {
            "torch": 'model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(model.forward)',
            "transformers": "args = TrainingArguments(bf16=True, fp16=False)",
            "lightning": 'trainer = Trainer(precision="bf16-mixed")',
            "accelerate": 'accelerator = Accelerator(mixed_precision="bf16")',
        },
    ),
    LOSS: (
        "find the operation that makes the first NaN, then resume from a checkpoint before that step",
        {
            "torch": "torch.autograd.set_detect_anomaly(True)",
            "transformers": 'args = TrainingArguments(debug="underflow_overflow", logging_nan_inf_filter=False)',
            "lightning": "trainer = Trainer(detect_anomaly=True)",
            "accelerate": "torch.autograd.set_detect_anomaly(True)",
        },
    ),
}
"""By cause: what to do, and a line by door, which stands where such lines stand in a script."""


def remedy(finding: Finding, door: Door) -> Advice | None:
    """What to try against a cause for which a training does not learn; None: it is none of these."""
    if finding.health not in ("not finite", "unknown"):
        return None
    short = SKIPPED if finding.key == "skipped_steps" else finding.short
    told = next((own for cause, own in REMEDIES.items() if short.endswith(cause)), None)
    return None if told is None else Advice("the run", f"{told[0]}: {told[1][door]}")
