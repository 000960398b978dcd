"""What the agent finds on a machine before a training starts, in plain words: one check a question."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

__all__ = ["Check", "Status"]

Status = Literal["ok", "note", "problem"]


class Check(Struct, frozen=True):
    """One question and its answer; `action` says what to do where something is to be done."""

    name: str
    status: Status
    text: str
    action: str = ""
