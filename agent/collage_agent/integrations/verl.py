"""verl: started by its plugin in each process where COLLAGE_ATTACH is 1; watches the processes that train weights.

Optimizers are watched from their first step, so that a rollout, which takes none, is left alone. A run is named
after the role of its training, "actor" or "critic"; supervised training is "trainer". What verl logs is recorded in
the process that logs it, under verl's names.
"""

from __future__ import annotations

import functools
import importlib
import math
import numbers
import os
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

from torch.optim.optimizer import register_optimizer_step_pre_hook

from collage_agent import session
from collage_agent.error_guard import Guard
from collage_agent.integrations.attach import name_by_role, step_begins

__all__ = ["begin", "names_of", "record", "role_of"]

_NAMES: Final = {
    "train/loss": "loss",
    "val/loss": "validation_loss",
    "train/grad_norm": "grad_norm_unclipped",
    "training/rollout_probs_diff_mean": "rollout_probs_diff_mean",
    "rollout_corr/k3_kl": "k3_kl",
    "rollout_corr/mismatch_kl": "mismatch_kl",
}
"""verl's names and those to record; all others are recorded as they are."""
_GUARD: Final = Guard()


def role_of(hook: FrameType) -> str:
    """The role that the stepping code trains, from verl's workers among its callers."""
    frame: FrameType | None = hook
    while frame is not None:
        worker = frame.f_locals.get("self")
        if getattr(getattr(worker, "config", None), "model_type", None) == "value_model":
            return "critic"
        if frame.f_code.co_name == "update_actor":
            return "actor"
        frame = frame.f_back
    return "trainer"


def names_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that verl logs, by the names under which they are recorded."""
    return {
        _NAMES.get(name, name): float(value)
        for name, value in values.items()
        if isinstance(value, numbers.Real) and not math.isnan(value)
    }


def record(values: Mapping[str, Any]) -> None:
    """Record what verl logs, at the watched optimizer's step where there is one; never raises."""
    try:
        if session.current_run() is None:
            given = os.environ.get("COLLAGE_RUN_NAME")
            session.init(name=f"{given}-metrics" if given else "metrics")
        session.log(names_of(values))
    except Exception as error:
        _GUARD.caught("recording what verl logs", error)


def begin() -> None:
    """Watch from the first steps on, and record what is logged. Called once, by the plugin."""
    name_by_role(role_of)
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: step_begins(optimizer))
    tracking = importlib.import_module("verl.utils.tracking").Tracking
    log = tracking.log

    @functools.wraps(log)
    def log_and_record(self: Any, data: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = log(self, data, *args, **kwargs)
        record(data)
        return result

    tracking.log = log_and_record
