"""One accountant for the server's memory: each holder's use, estimated in advance, within one budget.

| owner | what it holds | its bound | beyond it |
|---|---|---|---|
| process | interpreter, libraries, connections | `PROCESS_BYTES` | |
| bodies | requests that came, until they are stored | an eighth | 503, Retry-After |
| caches | encoded answers, coarse columns | an eighth, 128 MiB at most | the oldest go |
| answers | what a question reads, its answer | half of the rest | waits, then 503; 422 if it could never fit |
| evaluations | newest values, overviews, alerts | three quarters of the rest | waits; cut to the newest part |
| sealing | a part of a chunk on its way | half of the rest | waits, then goes on: the journal must empty |

The last three share the rest. A thread that works for one has a `Lease`; code that is about to take much memory
calls `hold` with an estimate from counts: rows × bytes. An uncharged lease costs no lock. Estimates leave out gaps
in the heap: once the process has grown to its limit, only one lease works at a time.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from threading import Condition
from typing import Final, Literal, TypeVar

from collage_server.errors import Busy, NeedsTooMuch

__all__ = [
    "BodyBudget",
    "BodyLease",
    "PROCESS_BYTES",
    "Lease",
    "Owner",
    "MemoryBudget",
    "available_memory",
    "begin_stream",
    "hold",
    "held_rows",
    "private_bytes",
    "released_afterwards",
    "require",
    "reserve",
    "trim_heap",
]

Owner = Literal["answers", "evaluations", "sealing"]
PROCESS_BYTES: Final = 128 * 2**20
_MOST_CACHED: Final = 128 * 2**20
_LIMIT_FILES: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_PATIENCE_SECONDS: Final[dict[Owner, float]] = {"answers": 2.0, "evaluations": 30.0, "sealing": 5.0}
_PATIENCE_OF_STREAMS: Final = 31.0
_STEP_BYTES: Final = 2**20
"""Rows are charged in steps: a lock a row would cost more than the row."""
_BETWEEN_TRIMS_SECONDS: Final = 0.5
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_LEAST_ALLOWED: Final = 2**20
_CUT: Final = 0.7
_GROWTH: Final = 0.1
_Row = TypeVar("_Row")


class MemoryBudget:
    """So many bytes for the whole server. Thread-safe."""

    def __init__(self, limit_bytes: int, most_bodies: int) -> None:
        self.limit_bytes = limit_bytes
        self.bodies = BodyBudget(min(most_bodies, limit_bytes // 8))
        self.cache_bytes = min(_MOST_CACHED, limit_bytes // 8)
        self.working_bytes = limit_bytes - PROCESS_BYTES - self.bodies.limit - self.cache_bytes
        self.held: Counter[Owner] = Counter()
        self._promised: Counter[Owner] = Counter()
        """What streams that reserve a part need in all. Together it fits: none of them waits for another to end."""
        self._free = Condition()
        self._most_private = max(limit_bytes * 15 // 16, private_bytes() + self.working_bytes)
        self._trimmed_at = -_BETWEEN_TRIMS_SECONDS

    def share(self, owner: Owner) -> int:
        """The largest total of an owner's leases."""
        return self.working_bytes * 3 // 4 if owner == "evaluations" else self.working_bytes // 2

    @contextmanager
    def lease(self, owner: Owner) -> Iterator[Lease]:
        """Memory that this thread or request holds from now on is the owner's, and is released at the end."""
        lease = Lease(self, owner)
        token = _LEASE.set(lease)
        try:
            yield lease
        finally:
            _LEASE.reset(token)
            lease.end()

    def take(self, owner: Owner, size: int, patience_seconds: float, *, promised: int = 0) -> None:
        """Hold more, and promise some, as soon as both fit.

        Raises:
            Busy: others have held too much for too long.
        """
        end = time.monotonic() + patience_seconds
        with self._free:
            while not self._fits(owner, size) or (
                promised and self._promised[owner] + promised > self.share(owner)
            ):
                left = end - time.monotonic()
                if left > 0 and self._free.wait(left):
                    continue
                if owner == "sealing":
                    break
                raise Busy(
                    f"{sum(self.held.values())} bytes are held for others and {self._promised[owner]} promised to "
                    f"exports, of {self.working_bytes} in all; ask again later, or give the server more with "
                    "--memory",
                    limit=self.working_bytes,
                    retry_after_seconds=2,
                )
            self.held[owner] += size
            self._promised[owner] += promised

    def give_back(self, owner: Owner, size: int, *, promised: int = 0) -> None:
        """An owner holds `size` bytes less, and less is promised to it."""
        with self._free:
            self.held[owner] -= size
            self._promised[owner] -= promised
            self._free.notify_all()

    def _fits(self, owner: Owner, size: int) -> bool:
        all_held = sum(self.held.values())
        if self.held[owner] + size > self.share(owner) or all_held + size > self.working_bytes:
            return False
        return not all_held or size < _STEP_BYTES or self._has_room(size)

    def _has_room(self, size: int) -> bool:
        """Whether the process is `size` bytes below its limit, if need be without what its heap keeps unused."""
        if private_bytes() + size <= self._most_private:
            return True
        now = time.monotonic()
        if now < self._trimmed_at + _BETWEEN_TRIMS_SECONDS:
            return False
        self._trimmed_at = now
        trim_heap()
        return private_bytes() + size <= self._most_private


class Lease:
    """The memory held by one request, or one piece of background work; used by one thread at a time."""

    def __init__(self, budget: MemoryBudget, owner: Owner) -> None:
        self.owner = owner
        self.held = 0
        self.reserved = 0
        self.promised = 0
        self.streams = False
        self.patience_seconds = _PATIENCE_SECONDS[owner]
        self._budget = budget

    def hold(self, size: int) -> None:
        """An owner holds `size` bytes more.

        Raises:
            NeedsTooMuch: it could never fit, whatever others hold.
            Busy: it does not fit beside what others hold.
        """
        share = self._budget.share(self.owner)
        if self.held + size > share:
            if self.owner != "sealing" and not self.streams:
                self.require(self.held + size)
            size = share - self.held
        if size > 0:
            more = self.held + size - max(self.held, self.reserved)
            if more > 0:
                self._budget.take(self.owner, more, self.patience_seconds)
            self.held += size

    def require(self, size: int) -> None:
        """Raise NeedsTooMuch if this much could never be held; holds nothing."""
        share = self._budget.share(self.owner)
        if size > share:
            raise NeedsTooMuch(
                f"this takes about {size // 2**20} MiB of memory, and the server has {share // 2**20} for it; ask "
                "for fewer points, layers or runs, or give it more --memory",
                limit=share,
            )

    def reserve(self, size: int) -> None:
        """Wait until this much is free, and reserve it, at most half of the share, for repeated holds.

        A stream waits patiently, now and at each later hold, because it has begun and can no longer be refused. A
        lease reserves once. Otherwise two leases that hold step by step would wait for each other. The other half
        is for short holds, and for this lease's needs beyond its reservation: no other lease may reserve it.

        Raises:
            Busy: it does not fit beside what others hold, or will.
        """
        share = self._budget.share(self.owner)
        promised = min(size, share)
        most = max(self.held, promised)
        if self.streams:
            self.patience_seconds = _PATIENCE_OF_STREAMS
        self._budget.take(self.owner, most - self.held, self.patience_seconds, promised=promised)
        self.promised, self.reserved = promised, min(size, share // 2)
        self._give_back(most)

    def release(self, left: int) -> None:
        """Set the held amount; the reserved part stays taken."""
        if self.held > left:
            before, self.held = max(self.held, self.reserved), left
            self._give_back(before)

    def end(self) -> None:
        """Nothing is held or reserved any more."""
        before, promised = max(self.held, self.reserved), self.promised
        self.held = self.reserved = self.promised = 0
        if before or promised:
            self._budget.give_back(self.owner, before, promised=promised)

    def _give_back(self, before: int) -> None:
        less = before - max(self.held, self.reserved)
        if less > 0:
            self._budget.give_back(self.owner, less)


class BodyBudget:
    """Request bodies that are not answered yet; used on the event loop only, so without a lock.

    `bytes` are those of whole bodies, `arriving` those that have come of others. Both together stay within `limit`.
    At any moment whole bodies are admitted up to `allowed`: less when reports have lately waited longer than
    `wait_seconds` for their commit, whatever the reason, and more again as they do not. It falls by a share, and
    grows by a share of the bytes acknowledged in time.

    A holder (a token or project) gets at most half of the budget alone, a third when another one is active, so
    there is always room for one more. A single body passes when nothing else is in flight, however small the
    budget.
    """

    def __init__(
        self, limit: int, *, wait_seconds: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = self.allowed = limit
        self.bytes = self.arriving = 0
        self.held_by: Counter[str] = Counter()
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._next_cut = -math.inf

    def waited(self, seconds: float, size: int) -> None:
        """Adjust the budget by how long a body waited for its acknowledgement; its bytes are still counted."""
        if seconds <= self._wait_seconds:
            self.allowed = min(self.limit, self.allowed + int(_GROWTH * size))
        elif self._clock() >= self._next_cut:
            # Bodies in flight now were admitted before this cut: their waits do not measure it.
            self._next_cut = self._clock() + seconds
            self.allowed = min(self.limit, max(_LEAST_ALLOWED, int(_CUT * min(self.allowed, self.bytes))))

    def admit(self, size: int) -> None:
        """Check that a body of `size` bytes would fit. Reserves nothing; bytes count as they arrive.

        Raises:
            Busy: whole bodies that wait leave no room for it.
        """
        if self.bytes and self.bytes + size > self.allowed:
            raise _busy(self.bytes, self.allowed)

    @contextmanager
    def receive(self, holders: Sequence[str]) -> Iterator[BodyLease]:
        """A lease that holds nothing yet, and grows with what arrives, within the share of each holder."""
        lease = BodyLease(self, holders)
        try:
            yield lease
        finally:
            lease.resize(0)


class BodyLease:
    """One request's part of the budget of bodies."""

    def __init__(self, budget: BodyBudget, holders: Sequence[str]) -> None:
        self.size = 0
        self._arrived = 0
        self._budget = budget
        self._holders = holders

    def arrive(self, size: int) -> None:
        """Hold `size` more bytes of a body that is not whole yet.

        Raises:
            Busy: they do not fit beside what others hold, or beyond a holder's share.
        """
        self._hold(self._arrived + size, self.size)

    def resize(self, size: int) -> None:
        """Hold `size` bytes from now on for a whole body.

        Raises:
            Busy: they do not fit beside what others hold.
        """
        self._hold(0, size)

    def _hold(self, arrived: int, size: int) -> None:
        budget, mine = self._budget, self._arrived + self.size
        held, more = budget.bytes + budget.arriving, arrived + size - mine
        if more > 0 and held > mine:
            if held + more > budget.limit:
                raise _busy(held - mine, budget.limit)
            for holder in self._holders:
                if budget.held_by[holder] + more > budget.limit - held:
                    raise Busy(
                        f"{holder} holds {budget.held_by[holder]} bytes of bodies in flight, and the rest of "
                        f"{budget.limit} is kept for others; send this one again later",
                        limit=budget.limit,
                        retry_after_seconds=1,
                    )
        budget.arriving += arrived - self._arrived
        budget.bytes += size - self.size
        for holder in self._holders if more else ():
            budget.held_by[holder] += more
            if not budget.held_by[holder]:
                del budget.held_by[holder]
        self._arrived, self.size = arrived, size


def _busy(others: int, limit: int) -> Busy:
    return Busy(
        f"{others} bytes of other bodies are in flight, at most {limit} in all now; send this one again later",
        limit=limit,
        retry_after_seconds=1,
    )


_LEASE: ContextVar[Lease | None] = ContextVar("lease", default=None)


def hold(size: int) -> None:
    """Charge an estimate to the owner that this thread works for; a test or a tool has none."""
    lease = _LEASE.get()
    if lease is not None:
        lease.hold(size)


def begin_stream() -> None:
    """Charges from here on are a streamed answer's: however large it is, each piece fits.

    Until it reserves, it is no more patient than a question: it holds step by step what others may wait for.
    """
    lease = _LEASE.get()
    if lease is not None:
        lease.streams = True


def require(size: int) -> None:
    """Charges the memory that a streamed answer holds at its end.

    Raises:
        NeedsTooMuch: it could never fit, whatever others hold.
    """
    lease = _LEASE.get()
    if lease is not None:
        lease.require(size)


def reserve(size: int) -> None:
    """Charges before a streamed answer begins: afterwards it could no longer be refused."""
    lease = _LEASE.get()
    if lease is not None:
        lease.reserve(size)


def held_rows(rows: Iterable[tuple[_Row, int]]) -> Iterator[_Row]:
    """The rows of (row, bytes), charged as they come, a step ahead."""
    ahead = 0
    for row, size in rows:
        ahead -= size
        if ahead < 0:
            hold(_STEP_BYTES - ahead)
            ahead = _STEP_BYTES
        yield row


@contextmanager
def released_afterwards(*owners: Owner) -> Iterator[None]:
    """Memory held inside is released at the end; with `owners`, only for these."""
    lease = _LEASE.get()
    before = 0 if lease is None else lease.held
    try:
        yield
    finally:
        if lease is not None and (not owners or lease.owner in owners):
            lease.release(before)


def trim_heap() -> None:
    """Return free heap memory to the system; only glibc keeps much of it."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Private memory of this process, without mapped files; 0 if the system does not report it."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def available_memory() -> int | None:
    """Bytes that this process may take: of its control group, else of the machine; None where neither is known."""
    found = []
    for name in _LIMIT_FILES:
        try:
            found.append(int(Path(name).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    with suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found, default=None)
