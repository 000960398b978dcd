"""Checks of a machine before a training starts, in plain words: one check per question.

For each optimizer library it says how the agent follows its steps, as far as that was tried.

`collage-monitor doctor` prints them. A check is added as a function; it only looks and never changes the machine
(`tests/launching/test_doctor.py`).
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

import httpx
import torch
from msgspec import Struct

from collage_agent.run_settings import read_settings, watch_defaults
from collage_agent.transport.report_log import waiting_spools
from collage_monitor.certificates import trusted_certificates
from collage_monitor.environment import ATTACH, VARIABLES, launch_variables, unknown_variables
from collage_monitor.errors import ServerUnreachable
from collage_monitor.local import data_folder, find_token, server_address, token_path

__all__ = [
    "Check",
    "LibraryTrial",
    "Status",
    "TRIED_LIBRARIES",
    "delivery_checks",
    "machine_checks",
    "optimizer_checks",
]

_TIMEOUT_SECONDS: Final = 3.0
_CLOCK_SECONDS: Final = 30.0
_FREE_BYTES: Final = 2 * 2**30
_INTEGRATIONS: Final = {
    "transformers": "collage_agent.integrations.transformers.CollageCallback",
    "lightning": "collage_agent.integrations.lightning.CollageCallback",
    "accelerate": "collage_agent.integrations.accelerate.watch_accelerated",
}
_LAUNCHERS: Final = {"TORCHELASTIC_RUN_ID": "torchrun", "SLURM_JOB_ID": "Slurm", "OMPI_COMM_WORLD_RANK": "MPI"}

_USUALLY: Final = {
    "shadow": "a sample of every tensor is stepped again in fp64",
    "rule": "a sample of every tensor, by fp64 formulas of ours",
}


Status = Literal["ok", "note", "problem"]


class Check(Struct, frozen=True):
    """One question and its answer; `action` says what to do, if anything."""

    name: str
    status: Status
    text: str
    action: str = ""


@dataclass(frozen=True)
class LibraryTrial:
    """The observations on one library: the usual source of u, and the optimizers with another one."""

    distribution: str
    usually: Literal["shadow", "rule"]
    whole_tensor: tuple[str, ...] = ()
    before_after: tuple[str, ...] = ()
    whole_optimizer: tuple[str, ...] = ()


TRIED_LIBRARIES: Final = {
    "torch": LibraryTrial("torch", "shadow", ("Adafactor", "Muon"), ("LBFGS",)),
    "optimi": LibraryTrial("torch-optimi", "shadow", ("StableAdamW",)),
    "torchao": LibraryTrial("torchao", "shadow"),
    "bitsandbytes": LibraryTrial("bitsandbytes", "rule", (), ("LAMB",)),
    "schedulefree": LibraryTrial("schedulefree", "shadow"),
    "pytorch_optimizer": LibraryTrial(
        "pytorch_optimizer",
        "shadow",
        ("Lamb", "LARS", "AdamP", "NovoGrad", "CAME", "SM3", "StableAdamW"),
        whole_optimizer=("Prodigy", "DAdaptAdam"),
    ),
}
"""By the library's name in docs/optimizers.md."""


def machine_checks(environment: Mapping[str, str]) -> Iterator[Check]:
    """Every check that needs no network and no disk."""
    yield _interpreter()
    yield from _devices()
    yield _rounding()
    yield _ranks(environment)
    yield from _variables(environment)
    yield _frameworks()
    yield from optimizer_checks()


def _interpreter() -> Check:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return Check("python", "ok", f"Python {platform.python_version()}, torch {torch.__version__} ({built})")


def _devices() -> Iterator[Check]:
    if not torch.cuda.is_available():
        yield Check("devices", "ok", "no CUDA device: everything runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        major, minor = torch.cuda.get_device_capability(index)
        if major >= 8:
            yield Check("devices", "ok", f"cuda:{index} {name}, capability {major}.{minor}, bfloat16 in hardware")
        else:
            yield Check(
                "devices",
                "note",
                f"cuda:{index} {name}, capability {major}.{minor}, has no bfloat16 arithmetic of its own",
                "expect bfloat16 to be slow there; float16 needs loss scaling",
            )


def _rounding() -> Check:
    """Whether bfloat16 sums here round to nearest, ties to even: what most of our explanations assume."""
    one = torch.ones(2, dtype=torch.bfloat16)
    small = torch.tensor([2.0**-8, 2.0**-8 + 2.0**-15]).bfloat16()
    if (one + small).tolist() == [1.0, 1.0 + 2.0**-7]:
        return Check("rounding", "ok", "bfloat16 sums round to nearest, ties to even")
    return Check("rounding", "note", "bfloat16 sums do not round to nearest here; measured numbers stay right")


def _ranks(environment: Mapping[str, str]) -> Check:
    rank, size = environment.get("RANK"), environment.get("WORLD_SIZE")
    launcher = next((name for key, name in _LAUNCHERS.items() if key in environment), None)
    if (rank is None) != (size is None):
        missing, there = ("WORLD_SIZE", "RANK") if size is None else ("RANK", "WORLD_SIZE")
        return Check(
            "ranks",
            "problem",
            f"{there} is set and {missing} is not: ranks would report as separate runs",
            f"set both, or unset {there}; torchrun sets them for you",
        )
    started = f" ({launcher})" if launcher else ""
    if rank is None:
        return Check("ranks", "ok", f"one process{started}; torchrun starts several and they share a run")
    return Check("ranks", "ok", f"rank {rank} of {size}{started}")


def _variables(environment: Mapping[str, str]) -> Iterator[Check]:
    given = {key: value for key, value in environment.items() if key.startswith("COLLAGE_")}
    shown = [f"{key}={'(hidden)' if key == VARIABLES['token'] else value}" for key, value in sorted(given.items())]
    yield Check("environment", "ok", ", ".join(shown) if shown else "no COLLAGE_ variable is set")
    known = f"known are {', '.join(VARIABLES.values())}"
    for key in (key for key, hint in unknown_variables(environment).items() if not hint):
        yield Check("environment", "problem", f"{key} is not a variable of ours", known)
    for told in _refused_values(environment):
        yield Check("environment", "problem", told, "correct or unset it; training would go on with the default")
    if given.get("COLLAGE_MODE") == "disabled":
        yield Check("environment", "note", "COLLAGE_MODE=disabled: nothing is reported", "unset it to report")
    if given.get("COLLAGE_MODE") == "offline" and "COLLAGE_SERVER_URL" in given:
        yield Check(
            "environment",
            "note",
            "COLLAGE_MODE=offline wins over COLLAGE_SERVER_URL: reports are kept on disk",
            "unset COLLAGE_MODE to send them",
        )
    folder = launch_variables({})["PYTHONPATH"]
    if given.get(ATTACH) == "1" and folder not in environment.get("PYTHONPATH", "").split(os.pathsep):
        yield Check(
            "environment",
            "problem",
            f"{ATTACH}=1 without the bootstrap folder in PYTHONPATH: nothing will be watched",
            'eval "$(collage-monitor run --print-environment)", after whatever sets PYTHONPATH',
        )


def _refused_values(environment: Mapping[str, str]) -> list[str]:
    """What the settings say when they ignore a variable."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("collage_agent")
    kept, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        read_settings(environment)
        watch_defaults(environment)
    finally:
        logger.removeHandler(handler)
        logger.propagate = kept
    return told


def _frameworks() -> Check:
    found = []
    for library, entry in _INTEGRATIONS.items():
        try:
            found.append(f"{library} {version(library)} ({entry})")
        except PackageNotFoundError:
            continue
    text = "; ".join(found) if found else "none of transformers, lightning, accelerate"
    return Check("frameworks", "ok", f"{text}; any loop: collage_agent.watch, or collage-monitor run")


def optimizer_checks() -> Iterator[Check]:
    """One check for each library that is installed. Imports and steps nothing."""
    for library, tried in TRIED_LIBRARIES.items():
        try:
            text = f"{library} {version(tried.distribution)}: {_USUALLY[tried.usually]}"
        except PackageNotFoundError:
            continue
        if tried.whole_tensor:
            text += f"; whole tensors in turns: {', '.join(tried.whole_tensor)}"
        if tried.whole_optimizer:
            text += f"; a copy of all of it: {', '.join(tried.whole_optimizer)}"
        if tried.before_after:
            text += f"; only what changed, not what was lost: {', '.join(tried.before_after)}"
        yield Check("optimizers", "ok", text)
    yield Check(
        "optimizers", "ok", "any other: a self-test at attach decides, and the run says what it found and why"
    )


def delivery_checks(environment: Mapping[str, str]) -> Iterator[Check]:
    """Every check of what happens to a report. Asks the server twice; writes nothing."""
    folder = data_folder(None, environment)
    yield _folder(folder)
    address = (environment.get("COLLAGE_SERVER_URL") or server_address(environment)).rstrip("/")
    token = environment.get("COLLAGE_TOKEN") or find_token(address, folder, environment)
    yield _token(folder, token)
    yield from _server(address, token, given=bool(environment.get("COLLAGE_SERVER_URL")))
    yield _spool(folder)


def _folder(folder: Path) -> Check:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(
            "data folder",
            "problem",
            f"{folder}: cannot be written; reports would be lost while the server is away",
            "set COLLAGE_DIR to a folder of yours",
        )
    free = shutil.disk_usage(there).free
    if free < _FREE_BYTES:
        return Check(
            "data folder",
            "note",
            f"{folder}: {free / 2**30:.1f} GiB are free; up to 1 GiB of reports may wait there for each process",
            "make room, or set COLLAGE_DIR",
        )
    return Check("data folder", "ok", f"{folder}, {free / 2**30:.0f} GiB free")


def _token(folder: Path, token: str | None) -> Check:
    path = token_path(folder)
    if path.exists() and os.name == "posix" and path.stat().st_mode & 0o077:
        return Check("token", "problem", f"{path} can be read by others", f"chmod 600 {path}")
    if token is None:
        return Check("token", "note", "none", "`collage-monitor up` makes one; for another server: COLLAGE_TOKEN")
    return Check("token", "ok", "there is one (hidden)")


def _server(address: str, token: str | None, *, given: bool) -> Iterator[Check]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        trusted = trusted_certificates(address)
        with httpx.Client(base_url=address, timeout=_TIMEOUT_SECONDS, trust_env=False, verify=trusted) as client:
            health = client.get("/healthz")
            # Whoever may send may ask for this, and need not read runs.
            answer = client.get("/api/v1/metrics-catalogue", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, ServerUnreachable) as error:
        yield Check(
            "server",
            "problem" if given else "note",
            f"nothing answers at {address} ({type(error).__name__}); reports are kept on disk until something does",
            "check the address" if given else "`collage-monitor up` starts a server on this machine",
        )
        return
    if not health.is_success:
        yield Check("server", "problem", f"{address} answers {health.status_code} to /healthz", "look at its log")
    elif answer.status_code in (401, 403):
        yield Check(
            "server",
            "problem",
            f"{address} {'refuses the' if token else 'asks for a'} token ({answer.status_code}): "
            "reports would wait on disk",
            "set COLLAGE_TOKEN to one that the server gave out, or COLLAGE_DIR to its data folder if it runs here",
        )
    elif not answer.is_success:
        yield Check(
            "server",
            "problem",
            f"{address} answers {answer.status_code} to /api/v1/metrics-catalogue; is it a Collage Monitor server?",
            "set COLLAGE_SERVER_URL",
        )
    else:
        yield Check("server", "ok", f"{address} answers")
    yield from _clock(health)


def _clock(answer: httpx.Response) -> Iterator[Check]:
    if "date" not in answer.headers:
        return
    try:
        ahead = time.time() - parsedate_to_datetime(answer.headers["date"]).timestamp()
    except ValueError:
        return
    if abs(ahead) > _CLOCK_SECONDS:
        yield Check(
            "clock",
            "note",
            f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's",
            "set it by NTP: curves over time would be shifted",
        )
    else:
        yield Check("clock", "ok", "agrees with the server's")


def _spool(folder: Path) -> Check:
    waiting = [path.stat().st_size for path in waiting_spools(folder)]
    if not waiting:
        return Check("waiting reports", "ok", "none")
    return Check(
        "waiting reports",
        "note",
        f"{len(waiting)} files, {sum(waiting) / 2**20:.1f} MiB, of runs whose server was away",
        "`collage-monitor sync` sends them, as does the next online run",
    )
