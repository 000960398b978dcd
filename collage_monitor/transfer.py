"""Moving whole runs over HTTP: out of a server as a stream of bytes, and into one as reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import httpx

from collage_monitor import wire
from collage_monitor.client import Client, quoted, refusal
from collage_monitor.errors import ServerUnreachable, Unavailable

__all__ = ["ExportFormat", "ExportStream", "TransferClient"]

ExportFormat = Literal["jsonl", "csv", "parquet"]
_Answer = TypeVar("_Answer")
_Message = TypeVar("_Message")
_TRIES: Final = 6
_LONGEST_WAIT_SECONDS: Final = 30.0


@dataclass(frozen=True, eq=False)
class ExportStream:
    """An export on its way: the bytes, and how many lines they will have where the format has lines."""

    parts: Iterator[bytes]
    lines: int | None


class TransferClient(Client):
    """A client that can also write. Every message may be sent twice, so what fails for a while is sent again."""

    def __enter__(self) -> TransferClient:
        return self

    @contextmanager
    def export(
        self, run_id: str, export_format: ExportFormat, *, layers: bool = True, ranks: bool = False
    ) -> Iterator[ExportStream]:
        """All that is stored of a run, as the server streams it; with `ranks` each rank's own totals, too.

        Raises:
            ServerUnreachable: nothing answers, or the stream breaks off before its end.
        """
        query = {"format": export_format, "layers": str(layers).lower(), "ranks": str(ranks).lower()}
        try:
            with self._http.stream("GET", f"/api/v1/runs/{quoted(run_id)}/export", params=query) as response:
                if response.is_error:
                    response.read()
                    raise refusal(response)
                lines = response.headers.get("Collage-Lines")
                yield ExportStream(response.iter_bytes(), None if lines is None else int(lines))
        except httpx.HTTPError as error:
            raise ServerUnreachable(
                f"no answer from {self.server_url}, or it broke off ({error}); run the export again"
            ) from error

    def create_run(self, project: str, create: wire.RunCreate) -> wire.Run:
        """Create a run, or resume the one of this id."""
        return self._post(f"/projects/{quoted(project)}/runs", create, wire.Run)

    def create_attempt(self, run_id: str, create: wire.AttemptCreate) -> wire.Attempt:
        """Register a launch."""
        return self._post(f"/runs/{quoted(run_id)}/attempts", create, wire.Attempt)

    def create_stream(self, run_id: str, create: wire.StreamCreate) -> wire.Stream:
        """Register a stream."""
        return self._post(f"/runs/{quoted(run_id)}/streams", create, wire.Stream)

    def send_reports(self, stream_id: str, batch: wire.ReportBatch) -> wire.BatchAnswer:
        """Send reports; durable when this returns."""
        return self._post(f"/streams/{quoted(stream_id)}/reports", batch, wire.BatchAnswer, wire.encode_batch)

    def _post(
        self,
        path: str,
        message: _Message,
        kind: type[_Answer],
        encode: Callable[[_Message], bytes] = wire.encode_message,
    ) -> _Answer:
        content = encode(message)
        for attempt in range(_TRIES):
            try:
                return self._send("POST", path, kind, content=content, content_type=wire.MSGPACK)
            except (ServerUnreachable, Unavailable) as error:
                if attempt == _TRIES - 1:
                    raise
                stated = getattr(error, "retry_after_seconds", None)
                time.sleep(min(2.0**attempt if stated is None else stated, _LONGEST_WAIT_SECONDS))
        raise AssertionError("unreachable")
