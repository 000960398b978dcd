"""One word for all ranks of a launch, through the key-value store that its launcher or process group already has.

Never a collective: a rank asks and goes on, whether or not the others have come that far, and gives up after a few
seconds where the store does not answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

import torch.distributed as distributed

__all__ = ["agree"]

_LOG = logging.getLogger("collage_agent")
_PATIENCE_SECONDS: Final = 5.0


def agree(
    key: str, proposal: str, environment: Mapping[str, str], seconds: float = _PATIENCE_SECONDS
) -> str | None:
    """What the first rank that asked for `key` proposed; None without a store, or without its answer in time."""
    answers: list[str] = []

    def ask() -> None:
        try:
            store = _store(environment, seconds)
            if store is not None:
                # With an empty expectation the first to come sets the value, in one operation of the store.
                answers.append(store.compare_set(f"collage/{key}", "", proposal).decode())
        except Exception as error:
            _LOG.warning("the process group's store was asked for the run's id and failed: %s", error)

    asking = threading.Thread(target=ask, name="collage-agreement", daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None


def _store(environment: Mapping[str, str], seconds: float) -> distributed.Store | None:
    """A connection of our own to the process group's store, else to the one that torchrun keeps for its workers."""
    if not distributed.is_available():
        return None
    if distributed.is_initialized():
        # A clone, so that a store that hangs holds up nobody else's questions.
        known: Any = distributed.distributed_c10d._get_default_store()
        own: distributed.Store = known.clone()
        return own
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return distributed.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )
