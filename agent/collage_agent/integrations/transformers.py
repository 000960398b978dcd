"""Hugging Face Trainer: a callback that watches the trainer's optimizer and takes over what the trainer logs.

trainer = Trainer(model, args, ..., callbacks=[CollageCallback("my-project")])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Unpack

from torch import nn

from collage_agent.handle import Watch
from collage_agent.integrations.attachment import Attachment, needs
from collage_agent.watch_options import WatchArguments

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise needs("transformers", error) from error

__all__ = ["CollageCallback"]

_NAMES: Final = {
    "eval_loss": "validation_loss",
    "grad_norm": "grad_norm_unclipped",
    "num_input_tokens_seen": "tokens",
}
"""The trainer's names and ours; the trainer's gradient norm is the one before clipping."""


class CollageCallback(TrainerCallback):
    """Watches the optimizer from the first step of `trainer.train()` on, and never changes the training.

    project, name: of the run; run_options: further arguments of `collage_agent.init`. An existing run is used
    instead. The other options are those of `collage_agent.watch`. The run's configuration is the TrainingArguments,
    secrets blanked. Steps are the trainer's global steps, also after a resume.

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
        self._attachment = Attachment(project, name, run_options, watch_options, "transformers")

    @property
    def handles(self) -> list[Watch]:
        """The watches of the last training."""
        return self._attachment.handles

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Begin the run; watch, if the optimizer is there already."""
        self._attachment.handles = []
        self._attachment.begin_run(args.to_dict())
        self._watch(state, objects)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Watch, if the optimizer was not there at the beginning."""
        if not self._attachment.handles:
            self._watch(state, objects)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **objects: Any,
    ) -> None:
        """Take over the trainer's scalars, on the first rank."""
        if state.is_world_process_zero and logs:
            self._attachment.log({_NAMES.get(key, key): value for key, value in logs.items()})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Finish the run if it was begun here."""
        self._attachment.end()

    def _watch(self, state: TrainerState, objects: Mapping[str, Any]) -> None:
        model, optimizer = objects.get("model"), objects.get("optimizer")
        if isinstance(model, nn.Module) and optimizer is not None:
            self._attachment.watch(model, [optimizer], first_step=state.global_step + 1)
