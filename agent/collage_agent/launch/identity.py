"""Who reports: run, launch, rank and process, shared by ranks through the environment, never by a collective."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ulid import ULID

from collage_agent.launch.agreement import agree

__all__ = ["Identity", "make_identity", "new_id"]

_LOG = logging.getLogger("collage_agent")
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
    """What a process says about itself; `stream_id` is its own, `run_id` and `launch_id` are all ranks'."""

    run_id: str
    launch_id: str
    stream_id: str
    rank: int
    world_size: int
    process_id: int
    host: str

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank speaks for the run: prints, and marks it finished."""
        return self.rank == 0

    def in_child_process(self) -> Identity:
        """The identity after a fork: same run and launch, a stream of its own."""
        return Identity(self.run_id, self.launch_id, new_id(), self.rank, self.world_size, os.getpid(), self.host)


def new_id() -> str:
    """A random id of 26 letters and digits that sorts by creation time (ULID)."""
    return str(ULID())


def make_identity(
    run_id: str | None, *, nth_run: int = 0, environment: Mapping[str, str] | None = None
) -> Identity:
    """The identity of this process.

    A single process makes its own ids. Ranks of one launch derive them from what their launcher gave to all of
    them (its run id, restart count, master address; on one machine also the parent process), so that they agree
    without talking to each other; over several machines they agree through the process group's store, if there is
    one by now. `nth_run` counts the runs begun in this process, the same number on each rank.
    """
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


def _rank_and_world_size(values: Mapping[str, str]) -> tuple[int, int]:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
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
