"""What access control asks of a store, whatever database is behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from collage_monitor import wire

__all__ = ["AccessStore", "ProjectUsage"]


@dataclass(frozen=True)
class ProjectUsage:
    """What a project holds: runs, distinct tags (those about to be added too), layers summed over its runs."""

    runs: int
    tags: int
    layers: int


class AccessStore(Protocol):
    """Tokens, the audit log, and whose a run is. Every method is one transaction and may come from any thread."""

    def add_token(self, token: wire.Token, digest: bytes, acts: Sequence[wire.Act]) -> None:
        """Keep a new token, and the act of making it."""

    def tokens(self) -> list[wire.Token]:
        """Every token, newest first."""

    def valid_tokens(self) -> dict[bytes, wire.Token]:
        """The tokens that are not revoked, by their secret's SHA-256."""

    def revoke_token(self, token_id: str, now: float, acts: Sequence[wire.Act]) -> wire.Token:
        """Revoke a token, once; a second time changes and records nothing. NotFound for an unknown id."""

    def note_uses(self, last_used_at: Mapping[str, float]) -> None:
        """Write when tokens were last used; an older time than the known one changes nothing."""

    def record(self, act: wire.Act) -> None:
        """Append one act to the audit log."""

    def acts(self, cursor: str | None, limit: int) -> wire.ActPage:
        """A page of the audit log, newest first."""

    def project_of(self, run_id: str) -> str | None:
        """The project that owns a run, also a deleted one; None when the id was never seen."""

    def project_of_stream(self, stream_id: str) -> str | None:
        """The project that owns a stream's run; None when the id was never seen."""

    def usage(self, project: str, tags: Collection[str] = ()) -> ProjectUsage:
        """What a project holds, with `tags` added."""
