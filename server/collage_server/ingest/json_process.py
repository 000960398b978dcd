"""Large JSON is decoded in a process of its own: in this one, whichever thread did it, every request would wait.

The decoder holds the interpreter until it is done, seconds for the largest body. The process starts with the first
large body, ends with the server, and begins anew once it has grown. It answers with the same message as msgpack.
"""

from __future__ import annotations

import asyncio
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import IO, Final

import msgspec

from collage_monitor import wire
from collage_server import errors
from collage_server.errors import Busy, ServerError
from collage_server.ingest.decode import Body, decoded_batch, decoded_message

__all__ = ["JsonProcess"]

_LENGTH: Final = struct.Struct("!Q")
_BATCH: Final = "ReportBatch"
_MOST_BYTES: Final = 256 * 2**20
"""A process that has taken more memory than this ends after its answer, where the system tells (Linux)."""
_LESS_URGENT: Final = 10
"""On a busy machine a CPU is the server's before it is this process's."""


class _Result(msgspec.Struct, array_like=True):
    """`message` as msgpack; or the error that it is."""

    message: bytes = b""
    refused: list[wire.RejectedReport] = []
    error: str = ""
    text: str = ""
    field: str | None = None
    limit: float | None = None


_DECODE_RESULT: Final = msgspec.msgpack.Decoder(_Result).decode


class JsonProcess:
    """Decodes one body at a time. On an event loop callers wait for their `turn`; `decode` belongs to threads."""

    def __init__(self) -> None:
        self.turn = asyncio.Semaphore()
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int | None:
        """Of the process, once there is one."""
        return None if self._process is None else self._process.pid

    def decode(self, kind: type, data: Body) -> tuple[bytes, list[wire.RejectedReport]]:
        """The message of this kind in a body as msgpack, and the reports of a batch that are not in it.

        Raises:
            BadRequest, Unprocessable, TooLarge: as `decoded_batch` and `decoded_message`.
            Busy: the process died of it, twice.
        """
        with self._lock:
            answer = self._exchange(kind, data) or self._exchange(kind, data)
        if answer is None:
            raise Busy("the body could not be decoded; send it in smaller batches", retry_after_seconds=1)
        result = _DECODE_RESULT(answer)
        if result.error:
            refusal: type[ServerError] = getattr(errors, result.error)
            raise refusal(result.text, field=result.field, limit=result.limit)
        return result.message, result.refused

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _exchange(self, kind: type, data: Body) -> bytes | None:
        """Its answer; None when it ended without one."""
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            process = self._process = _start_process()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the decoding process has no pipes")
        try:
            _write(process.stdin, kind.__name__.encode())
            _write(process.stdin, data)
            answer = _read(process.stdout)
        except OSError:
            answer = None
        if answer is None:
            self._end()
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _start_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        # Ctrl-C in a terminal is for the server, which ends this process when it is done with it. A session of its
        # own would have a share of the CPUs as large as the server's, whatever its priority.
        process_group=0,
    )


def _write(stream: IO[bytes], frame: Body) -> None:
    stream.write(_LENGTH.pack(len(frame)))
    stream.write(frame)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    frame = stream.read(size)
    return frame if len(frame) == size else None


def _decoded(kind: str, data: bytes) -> _Result:
    try:
        if kind == _BATCH:
            batch, refused = decoded_batch(data, wire.JSON)
            return _Result(wire.encode_batch(batch), refused)
        return _Result(wire.encode_message(decoded_message(data, getattr(wire, kind), wire.JSON)))
    except ServerError as error:
        return _Result(error=type(error).__name__, text=error.message, field=error.field, limit=error.limit)
    except (OverflowError, RecursionError, MemoryError) as error:
        return _Result(error="BadRequest", text=f"the body cannot be decoded: {error}", field="body")


def _peak_bytes() -> int:
    """Of this program alone: what `getrusage` says of a program goes on from the one that started it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _serve(tasks: IO[bytes], answers: IO[bytes]) -> None:
    while (kind := _read(tasks)) is not None and (data := _read(tasks)) is not None:
        _write(answers, msgspec.msgpack.encode(_decoded(kind.decode(), data)))
        if _peak_bytes() > _MOST_BYTES:
            return


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(_LESS_URGENT)
    _serve(sys.stdin.buffer, sys.stdout.buffer)
