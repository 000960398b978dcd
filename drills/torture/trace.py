"""System calls of a process as strace writes them: which of them had ended before which began."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from tests.system import require

__all__ = ["Call", "parse", "requests", "settled", "synced_before", "synced_bytes", "traced"]

WRITES = frozenset({"write", "writev", "sendto", "sendmsg"})
READS = frozenset({"read", "recvfrom", "recvmsg"})
SYNCS = frozenset({"fsync", "fdatasync"})
_CALLS = sorted(WRITES | READS | SYNCS | {"pwrite64", "ftruncate"})
_LINE = re.compile(r"(\d+)\s+(\d+\.\d+) (.*)")
_BEGIN = re.compile(r"(\w+)\((.*)")
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>(.*)")
_RESULT = re.compile(r"\)\s+= (-?\d+)")
_PWRITE = re.compile(r", (\d+), (\d+)\)?\s*(?:= .*)?$")


@dataclass
class Call:
    """One call: `begin` and `end` in seconds. strace stamps the begin before the kernel runs it, the end before the
    process goes on; so `a.end < b.begin` means what it says, also over two traces of one machine."""

    name: str
    arguments: str
    begin: float
    end: float = float("inf")
    result: int | None = None

    def on(self, part):
        """Whether its file or socket is called so."""
        return part in self.arguments.partition(">")[0]


def traced(command, file):
    """`command` under strace, all threads, with file names, into `file`."""
    return [
        require("strace"),
        "-f",
        "-y",
        "-ttt",
        "-s",
        "60",
        "-e",
        f"trace={','.join(_CALLS)}",
        "-o",
        file,
        *command,
    ]


def parse(text):
    """The calls in `text`, in the order in which they began; one that never ended has no result."""
    calls: list[Call] = []
    open_calls: dict[str, Call] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        process, stamp, rest = match[1], float(match[2]), match[3]
        resumed = _RESUMED.match(rest)
        if resumed is not None:
            call = open_calls.pop(process, None)
            if call is not None:
                _end(call, resumed[2], stamp)
            continue
        begun = _BEGIN.match(rest)
        if begun is None:
            continue
        call = Call(begun[1], begun[2], stamp)
        calls.append(call)
        if rest.endswith("<unfinished ...>"):
            open_calls[process] = call
        else:
            _end(call, rest, stamp)
    return calls


def _end(call, text, stamp):
    """What the line that ends a call says; `text` goes on where an unfinished one broke off."""
    found = _RESULT.search(text)
    call.end = stamp
    call.result = int(found[1]) if found else None
    if call.arguments.endswith("<unfinished ...>"):
        call.arguments = call.arguments.removesuffix(" <unfinished ...>") + text


def requests(calls, path):
    """(read of a POST to `path`, write of the answer 200 to it) of a client that waits for each answer."""
    socket, pairs, asked = None, [], None
    for call in calls:
        if call.name in READS and f'"POST {path} ' in call.arguments:
            asked, socket = call, call.arguments.partition(",")[0]
        elif asked is not None and call.name in WRITES and call.arguments.startswith(f"{socket},"):
            assert '"HTTP/1.1 200' in call.arguments, call
            pairs.append((asked, call))
            asked = None
    return pairs


def synced_before(calls, log, begin, end):
    """Whether between these moments something was written to `log`, and then synchronised to the end."""
    written = [
        c for c in calls if c.name in {"pwrite64", "write"} and c.on(log) and begin < c.begin and c.end < end
    ]
    syncs = [c for c in calls if c.name in SYNCS and c.on(log) and c.result == 0 and c.end < end]
    return bool(written) and any(sync.begin > written[-1].end for sync in syncs)


def synced_bytes(calls, log, moment):
    """How long an append-only `log` was for certain at this moment: what its last ended synchronisation held."""
    length, begin = (
        0,
        max((c.begin for c in calls if c.name in SYNCS and c.on(log) and c.end < moment), default=0.0),
    )
    for call in calls:
        if call.name == "pwrite64" and call.on(log) and call.end < begin:
            place = _PWRITE.search(call.arguments)
            assert place is not None, call
            length = max(length, int(place[1]) + int(place[2]))
    return length


def settled(file, seconds=10.0):
    """The trace's text, once it has not grown for a moment."""
    size, deadline = -1, time.monotonic() + seconds
    while time.monotonic() < deadline and Path(file).stat().st_size != size:
        size = Path(file).stat().st_size
        time.sleep(0.2)
    return Path(file).read_text(errors="replace")
