"""Lightning: a callback that watches the module's optimizers and takes over what the module logs.

trainer = Trainer(..., callbacks=[CollageCallback("my-project")])
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Unpack

from collage_agent.handle import Watch
from collage_agent.integrations.attachment import Attachment, needs
from collage_agent.watch_options import WatchArguments

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise needs("lightning", error) from error

__all__ = ["CollageCallback"]

_NAMES: Final = {"train_loss": "loss", "val_loss": "validation_loss", "valid_loss": "validation_loss"}
"""Names that modules usually give to their losses, and ours."""
_OF_VALIDATION: Final = re.compile(r"(^|[_/])val(id(ation)?)?([_/]|$)")


class CollageCallback(Callback):
    """Watches every optimizer of the module from the first training step on, and never changes the training.

    project, name: of the run; run_options: further arguments of `collage_agent.init`. An existing run is used
    instead. The other options are those of `collage_agent.watch`. The run's configuration is the module's
    hyper-parameters. What `self.log` records every `trainer.log_every_n_steps` is recorded here too.

    Raises:
        ValueError, TypeError: a watch option that cannot be used.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        *,
        run_options: Mapping[str, Any] | None = None,
        **watch_options: Unpack[WatchArguments],
    ) -> None:
        super().__init__()
        self._attachment = Attachment(project, name, run_options, watch_options, "lightning")

    @property
    def handles(self) -> list[Watch]:
        """The watches of the last training, one an optimizer."""
        return self._attachment.handles

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the run and watch; a checkpoint has been loaded by now."""
        self._attachment.handles = []
        self._attachment.begin_run(dict(pl_module.hparams))
        # The trainer counts the steps of all optimizers together.
        only_one = len(trainer.optimizers) == 1
        first_step = trainer.global_step + 1 if only_one else None
        self._attachment.watch(pl_module, trainer.optimizers, first_step=first_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take over what was logged in this step, on the first rank, as often as loggers do."""
        if trainer.is_global_zero and trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer.logged_metrics, of_validation=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the validation's results, on the first rank."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            self._log(trainer.callback_metrics, of_validation=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish the run if it was begun here."""
        self._attachment.end()

    def _log(self, metrics: Mapping[str, Any], *, of_validation: bool) -> None:
        # The trainer keeps the last validation's results among the metrics of every later step.
        values = {
            _NAMES.get(key, key): value
            for key, value in metrics.items()
            if bool(_OF_VALIDATION.search(key)) is of_validation
        }
        if values:
            self._attachment.log(values)
