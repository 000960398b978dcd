"""Who reports: run, launch, rank and process.

Ranks share run and launch through the environment; over several machines through the key-value store that their
launcher or process group already has. It never uses a collective: a rank asks and continues, whether or not the
others are there, and gives up after a few seconds if the store does not answer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as distributed
from ulid import ULID

from collage_agent.run_settings import ROLE_ENDS

__all__ = ["Identity", "agree", "make_identity", "new_id"]

_LOG = logging.getLogger("collage_agent")
_PATIENCE_SECONDS: Final = 5.0
_SHARED_BY_LAUNCH: Final = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
_NOT_AN_ID: Final = re.compile(r"[^A-Za-z0-9_.:-]")


@dataclass(frozen=True)
class Identity:
    """The identity of a process; `stream_id` is its own, `run_id` and `launch_id` are shared by all ranks.

    `role`: of a process that writes to the run beside its training; None: it is the training.
    """

    run_id: str
    launch_id: str
    stream_id: str
    rank: int
    world_size: int
    process_id: int
    host: str
    role: str | None = None

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank prints, and marks the run finished if it is the training's."""
        return self.rank == 0

    def in_child_process(self) -> Identity:
        """The identity after a fork: same run and launch, a stream of its own; a second writer has a new launch."""
        if self.role is not None:
            return _second_writer(self.run_id, self.role)
        return replace(self, stream_id=new_id(), process_id=os.getpid())

    def in_next_attempt(self) -> Identity:
        """The identity after going back to an earlier step: a launch that all ranks call the same, a new stream."""
        return replace(self, launch_id=_digest("again", self.launch_id), stream_id=new_id())


def new_id() -> str:
    """A random id of 26 letters and digits that sorts by creation time (ULID)."""
    return str(ULID())


def make_identity(
    run_id: str | None,
    *,
    nth_run: int = 0,
    environment: Mapping[str, str] | None = None,
    role: str | None = None,
) -> Identity:
    """The identity of this process.

    A single process makes its own ids. Ranks of one launch derive them from what their launcher gave to all of
    them (its run id, restart count, master address; on one machine also the parent process), so that they agree
    without talking to each other; over several machines they agree through the process group's store, if there is
    one by now. `nth_run` counts the runs begun in this process, the same number on each rank. With a `role` each
    process is a launch by itself: one that a trainer starts inherits the trainer's rank, and is none.
    """
    if role is not None:
        assert run_id is not None
        return _second_writer(run_id, role)
    values = os.environ if environment is None else environment
    rank, world_size = _rank_and_world_size(values)
    if world_size == 1 and "TORCHELASTIC_RUN_ID" not in values:
        chosen, launch = run_id or new_id(), new_id()
    else:
        agreed = None
        if not _on_one_machine(values):
            agreed = agree(f"{nth_run}/{values.get('TORCHELASTIC_RESTART_COUNT', '')}", new_id(), values)
        chosen = run_id or _shared_run_id(values, nth_run, agreed)
        launch = _digest("launch", chosen, agreed or str(nth_run), *_launch_marks(values))
    return Identity(chosen, launch, new_id(), rank, world_size, os.getpid(), socket.gethostname())


def _second_writer(run_id: str, role: str) -> Identity:
    stream_id = f"{role}{ROLE_ENDS}{new_id()}"
    return Identity(run_id, new_id(), stream_id, 0, 1, os.getpid(), socket.gethostname(), role)


def agree(
    key: str, proposal: str, environment: Mapping[str, str], seconds: float = _PATIENCE_SECONDS
) -> str | None:
    """The proposal of the first rank that asked for `key`; None without a store, or without an answer in time."""
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
        # A clone: if the store hangs, other users of it do not wait.
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


def _rank_and_world_size(values: Mapping[str, str]) -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    try:
        rank, world_size = int(values.get("RANK", "0")), int(values.get("WORLD_SIZE", "1"))
    except ValueError:
        rank, world_size = 0, 0
    if world_size < 1 or not 0 <= rank < world_size:
        _LOG.warning(
            "RANK=%r, WORLD_SIZE=%r make no sense together: reporting as a single process",
            values.get("RANK"),
            values.get("WORLD_SIZE"),
        )
        return 0, 1
    return rank, world_size


def _shared_run_id(values: Mapping[str, str], nth_run: int, agreed: str | None) -> str:
    elastic = values.get("TORCHELASTIC_RUN_ID", "")
    if elastic not in {"", "none"}:
        # A launcher's id is the job's: a restarted launch resumes the run.
        name = _NOT_AN_ID.sub("-", elastic)
        readable = name if len(name) <= 48 and name[0].isalnum() else _digest("run", elastic)[:24]
        return readable if nth_run == 0 else f"{readable}-{nth_run + 1}"
    if agreed is not None:
        return agreed
    if not _on_one_machine(values):
        _LOG.warning(
            "the ranks of this launch share no id, so each would report as a run of its own: call init after "
            "torch.distributed.init_process_group, or set COLLAGE_RUN_ID to one value on all ranks"
        )
        return new_id()
    begun, mark = _parent_process()
    random = hashlib.sha256(f"{mark}/{nth_run}".encode()).digest()[:10]
    return str(ULID((begun * 1000).to_bytes(6, "big") + random))


def _launch_marks(values: Mapping[str, str]) -> list[str]:
    marks = [f"{name}={values.get(name, '')}" for name in _SHARED_BY_LAUNCH]
    return [*marks, _parent_process()[1]] if _on_one_machine(values) else marks


def _on_one_machine(values: Mapping[str, str]) -> bool:
    """Whether all ranks are known to be children of one launcher process."""
    same_count = values.get("LOCAL_WORLD_SIZE") == values.get("WORLD_SIZE", "1")
    loopback = values.get("MASTER_ADDR", "") in {"localhost", "127.0.0.1", "::1"}
    return same_count or loopback


def _parent_process() -> tuple[int, str]:
    """When the parent process began (Unix seconds) and a text that no other process on earth should share."""
    parent = os.getppid()
    try:
        # Field 22 of /proc/PID/stat, counted behind the command's closing parenthesis: start in clock ticks.
        ticks = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        # The boot time wanders with the clock, so ranks agree on it to the minute only.
        begun = (int(boot.split()[1]) + ticks // os.sysconf("SC_CLK_TCK")) // 60 * 60
    except (OSError, ValueError, IndexError, StopIteration):
        # No /proc: the day keeps the id roughly sortable, and equal on all ranks.
        ticks, begun = 0, int(time.time()) // 86_400 * 86_400
    return begun, f"{socket.gethostname()}/{parent}/{ticks}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
