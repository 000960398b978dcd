"""Training text that every machine has: the sources of Python's standard library, as bytes. No download."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Corpus", "DOCUMENTATION", "MASK", "NO_TARGET", "batch", "documentation", "masked", "standard_library"]

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT_EVERY = 16
DOCUMENTATION = "pydoc_data"
"""The package of the standard library that holds the language reference, as text for `help`."""
_TOPICS_HELD_OUT_EVERY = 8
MASK = 256
"""Stands for a byte that the model shall guess."""
NO_TARGET = -100
"""Where nothing is to be predicted; `cross_entropy` leaves it out."""
_MASKED_SHARE = 0.15


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, uint8 tensors [bytes]; they share no file."""

    training: torch.Tensor
    validation: torch.Tensor


def standard_library(folder: Path | None = None, *, without: Collection[str] = ()) -> Corpus:
    """The `.py` files of the standard library (or of `folder`), ordered by name; each 16th is for validation.

    without: packages to leave out.

    Raises:
        FileNotFoundError: the folder holds too few sources.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(_sources(root, without), key=lambda path: path.relative_to(root).as_posix())
    if len(files) < _HELD_OUT_EVERY:
        raise FileNotFoundError(f"{root} holds {len(files)} Python sources; at least {_HELD_OUT_EVERY} are needed")
    held_out = files[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    training = [path for index, path in enumerate(files, 1) if index % _HELD_OUT_EVERY]
    return Corpus(_read(training), _read(held_out))


def documentation() -> Corpus:
    """The language reference as `help` shows it, English prose with examples; each 8th topic is for validation."""
    from pydoc_data.topics import topics

    texts = [text.encode() for _, text in sorted(topics.items())]
    held_out = texts[_TOPICS_HELD_OUT_EVERY - 1 :: _TOPICS_HELD_OUT_EVERY]
    training = [text for index, text in enumerate(texts, 1) if index % _TOPICS_HELD_OUT_EVERY]
    return Corpus(_joined(training), _joined(held_out))


def batch(text: torch.Tensor, size: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), each int64 [size, length]: passages whose places depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(text.numel() - length, (size, 1), generator=generator)
    passages = text[starts + torch.arange(length + 1)].long()
    return passages[:, :-1], passages[:, 1:]


def masked(text: torch.Tensor, size: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `batch`, for a masked language model: about 15 % of the inputs are `MASK`, and only these have targets."""
    passages, _ = batch(text, size, length, seed)
    generator = torch.Generator().manual_seed(-1 - seed)
    hidden = torch.rand(passages.shape, generator=generator) < _MASKED_SHARE
    hidden[:, 0] = True  # A batch without any target has no loss.
    return passages.masked_fill(hidden, MASK), passages.masked_fill(~hidden, NO_TARGET)


def _sources(root: Path, without: Collection[str]) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        # Do not enter these: site-packages may be a hundred times as large as the library.
        below[:] = [name for name in below if name not in _LEFT_OUT and name not in without]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _read(files: list[Path]) -> torch.Tensor:
    return _joined([path.read_bytes() for path in files])


def _joined(texts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)
