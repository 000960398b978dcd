"""Envelopes, the interface of the transports that send them, and a transport in memory.

`Transport` is public: a user may pass one to `init`. Its methods and the order of calls are fixed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol, cast

import msgspec

from collage_monitor.errors import WireError
from collage_monitor.wire import (
    AttemptCreate,
    BatchAnswer,
    Report,
    ReportBatch,
    RunCreate,
    RunUpdate,
    StreamCreate,
    decode_batch,
    decode_message,
    encode_batch,
    encode_message,
)

__all__ = ["Body", "Envelope", "Kind", "MemoryTransport", "Transport", "WORKER_THREAD_NAME"]

WORKER_THREAD_NAME: Final = "collage-agent"
"""The one thread that sends."""

Body = RunCreate | AttemptCreate | StreamCreate | ReportBatch | RunUpdate
Kind = Literal["run", "attempt", "stream", "reports", "update"]

_KINDS: Final[dict[type, Kind]] = {
    RunCreate: "run",
    AttemptCreate: "attempt",
    StreamCreate: "stream",
    ReportBatch: "reports",
    RunUpdate: "update",
}
_MESSAGES: Final = {kind: message for message, kind in _KINDS.items()}


class _Record(msgspec.Struct, frozen=True):
    kind: Kind
    project: str
    run_id: str
    stream_id: str
    body: bytes


_DECODE: Final = msgspec.msgpack.Decoder(_Record).decode


@dataclass(frozen=True)
class Envelope:
    """A message and where it belongs. `stream_id` names the sending stream, also for messages about the run."""

    project: str
    run_id: str
    stream_id: str
    body: Body

    @property
    def kind(self) -> Kind:
        """The kind of message, one of five."""
        return _KINDS[type(self.body)]

    @property
    def report_count(self) -> int:
        """How many reports are inside."""
        return len(self.body.reports) if isinstance(self.body, ReportBatch) else 0

    def encoded_body(self) -> bytes:
        """The message as it goes over the wire, msgpack."""
        return encode_batch(self.body) if isinstance(self.body, ReportBatch) else encode_message(self.body)

    def to_bytes(self) -> bytes:
        """The whole envelope, for the spool."""
        return msgspec.msgpack.encode(
            _Record(self.kind, self.project, self.run_id, self.stream_id, self.encoded_body())
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Envelope:
        """The envelope behind `to_bytes`.

        Raises:
            WireError: not an envelope, or its message cannot be decoded.
        """
        try:
            record = _DECODE(data)
        except msgspec.MsgspecError as error:
            raise WireError(f"not a spooled message: {error}") from error
        if record.kind == "reports":
            body: Body = decode_batch(record.body)
        else:
            body = cast(Body, decode_message(record.body, _MESSAGES[record.kind]))
        return cls(record.project, record.run_id, record.stream_id, body)


class Transport(Protocol):
    """The way out of the process. Used by one worker thread at a time, so every call may block."""

    def send(self, envelope: Envelope, wait: Callable[[float], bool]) -> BatchAnswer:
        """Deliver one message and return the server's answer (an empty one for anything but reports).

        The message is acknowledged when this returns, and only then. Waits between tries call `wait`, which returns
        True when the run is ending and waiting should stop.

        Raises:
            ServerUnreachable, Unavailable: the same message may be taken later.
            NotAuthorised, NotFound, ServerRefusal: the server's final word on this message.
        """

    def close(self) -> None:
        """Let go of sockets and other resources; a later send opens them again."""


class MemoryTransport:
    """Keeps every message, decoded from its encoded form, and acknowledges it; answers duplicates as a server does.

    `envelopes` also tell project, run and stream of each message.
    """

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        self._seen: set[tuple[str, str, int]] = set()
        self._lock = threading.Lock()

    @property
    def messages(self) -> list[Body]:
        """All messages in the order in which they arrived."""
        with self._lock:
            return [envelope.body for envelope in self.envelopes]

    @property
    def reports(self) -> list[Report]:
        """All reports in the order in which they arrived, duplicates included."""
        return [
            report for message in self.messages if isinstance(message, ReportBatch) for report in message.reports
        ]

    def send(self, envelope: Envelope, wait: Callable[[float], bool]) -> BatchAnswer:
        """Keep the message; duplicates are those reports whose (run, stream, seq) was here before."""
        arrived = Envelope.from_bytes(envelope.to_bytes())
        with self._lock:
            self.envelopes.append(arrived)
            if not isinstance(arrived.body, ReportBatch):
                return BatchAnswer(accepted=0, duplicates=0)
            keys = [(arrived.run_id, arrived.stream_id, report.seq) for report in arrived.body.reports]
            fresh = set(keys) - self._seen
            self._seen |= fresh
            return BatchAnswer(accepted=len(fresh), duplicates=len(keys) - len(fresh))

    def close(self) -> None:
        """Nothing to let go of."""
