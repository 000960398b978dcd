"""The cost of a step: CPU time of an optimizer step over bf16 parameters, one thread.

The stated ratios are those of 85 million parameters in 148 tensors, GPT-2 small's blocks. Further figures are
measured over 10 million in 76 tensors, where the fixed cost of each tensor counts for more. Every contender has its
own copy of the parameters; rounds alternate between all of them. Compiled steps are compiled before the first
round. C++ compilers differ in how wide the vectors are that they prefer: where the processor has a choice, our
compiled step meets both widths, each in a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from collage_optim import STRATEGIES, CollageAdamW
from collage_optim.arithmetic import release_scratch
from torch import Tensor

from benchmarks._harness import Figure, Measuring, Options, main

Model = tuple[int, int]
"""Width and blocks."""
GPT2_SMALL: Model = (768, 12)
LITTLE: Model = (368, 6)
ROUNDS = 15
WARM_UP = 3
LR, WEIGHT_DECAY = 1e-4, 0.1
EXTRA_MEMORY_LIMIT = 1.7
BASES = {"eager": "torch bf16 foreach", "compiled": "torch fp32 master fused"}
"""What our steps are compared with, by their form."""
LIMITS: dict[Model, dict[str, float]] = {
    GPT2_SMALL: {"plus eager": 3.0, "split-master eager": 3.0, "plus compiled": 1.1, "split-master compiled": 1.1},
    LITTLE: {"plus eager": 3.0, "plus compiled": 2.0, "split-master compiled": 1.3},
}
"""Of the median ratios to torch's steps."""
WIDTHS = (256, 512)
"""Bits of the vectors that a compiler may prefer on a processor that has both."""
WIDE_STEP = "split-master compiled"
COMPILED = ("plus", "split-master", "split-master-16bit")
NOTICING_LIMIT = 0.01

Step = Callable[[], object]


def shapes(model: Model) -> list[tuple[int, ...]]:
    """A GPT's tensors: twelve a block, two embeddings, the last norm."""
    d, blocks = model
    block: list[tuple[int, ...]] = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(256, d), (128, d), *block * blocks, (d,), (d,)]


def parameters(model: Model, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    """Fresh parameters with gradients."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes(model):
        parameter = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype))
        parameter.grad = (torch.randn(shape, generator=generator) * 1e-3).to(dtype)
        found.append(parameter)
    return found


def torch_step(model: Model, seed: int, dtype: torch.dtype = torch.bfloat16, **form: Any) -> Step:
    """torch's own AdamW."""
    return torch.optim.AdamW(parameters(model, seed, dtype), lr=LR, weight_decay=WEIGHT_DECAY, **form).step


def torch_master_step(model: Model, seed: int, **form: Any) -> Step:
    """torch's AdamW on fp32 master weights: the gradients are converted, and the new weights copied back."""
    visible = parameters(model, seed)
    gradients = [parameter.grad for parameter in visible if parameter.grad is not None]
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in visible]
    wide = [torch.empty_like(master) for master in masters]
    for master, gradient in zip(masters, wide, strict=True):
        master.grad = gradient
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, **form)

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(wide, gradients)
        optimizer.step()
        torch._foreach_copy_(list[Tensor](visible), list[Tensor](masters))

    return step


def own_step(model: Model, seed: int, strategy: str, **options: Any) -> Step:
    """A step of our AdamW, under one strategy."""
    return CollageAdamW(
        parameters(model, seed), lr=LR, weight_decay=WEIGHT_DECAY, strategy=strategy, **options
    ).step


def gated_contenders(model: Model, seed: int) -> dict[str, Step]:
    """The contenders of the stated ratios, and the lightest of our compiled steps."""
    found = {
        BASES["eager"]: torch_step(model, seed, foreach=True),
        BASES["compiled"]: torch_master_step(model, seed, fused=True),
    }
    found.update({f"{strategy} eager": own_step(model, seed, strategy) for strategy in ("plus", "split-master")})
    found.update({f"{strategy} compiled": own_step(model, seed, strategy, compiled=True) for strategy in COMPILED})
    return found


def further_contenders(seed: int) -> dict[str, Step]:
    """Contenders of further figures, beside the stated ratios."""
    model = LITTLE
    found = gated_contenders(model, seed) | {
        "torch bf16 for-loop": torch_step(model, seed, foreach=False),
        "torch bf16 fused": torch_step(model, seed, fused=True),
        "torch fp32 fused, no copies": torch_step(model, seed, torch.float32, fused=True),
        "torch fp32 master foreach": torch_master_step(model, seed, foreach=True),
        "torch fp32 master for-loop": torch_master_step(model, seed, foreach=False),
        "plus eager, storage arithmetic": own_step(model, seed, "plus", arithmetic="storage"),
    }
    for strategy in sorted(STRATEGIES.keys() - {"plus", "split-master", "fp32-states"}):
        found[f"{strategy} eager"] = own_step(model, seed, strategy)
    return found


def library_contenders(seed: int) -> tuple[dict[str, Step], list[str]]:
    """Other libraries' Kahan summation, and a line for each library that is not installed."""
    found: dict[str, Step] = {}
    missing = []
    options = {"lr": LR, "weight_decay": WEIGHT_DECAY, "kahan_sum": True}
    for library, name in (("optimi", "AdamW"), ("pytorch_optimizer", "StableAdamW")):
        if importlib.util.find_spec(library) is None:
            missing.append(f"{library} is not installed: its Kahan summation is not in the table")
            continue
        make = getattr(importlib.import_module(library), name)
        for form, foreach in (("for-loop", False), ("foreach", True)):
            found[f"{library} {name} kahan {form}"] = make(
                parameters(LITTLE, seed), foreach=foreach, **options
            ).step
    return found, missing


def restore_gradients(step: Step, seed: int) -> None:
    """Give back gradients that a step used as scratch (optimi's does)."""
    owner = getattr(step, "__self__", None)
    if owner is not None and type(owner).__module__.startswith("optimi"):
        fresh: list[Tensor | None] = [parameter.grad for parameter in parameters(LITTLE, seed)]
        for parameter, gradient in zip(owner.param_groups[0]["params"], fresh, strict=True):
            parameter.grad = gradient


def alternate(contenders: dict[str, Step], rounds: int, seed: int) -> dict[str, list[float]]:
    """CPU milliseconds of each contender's steps, one a round, in turn."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(WARM_UP + rounds):
        for name, step in contenders.items():
            restore_gradients(step, seed)
            started = time.process_time()
            step()
            if turn >= WARM_UP:
                times[name].append((time.process_time() - started) * 1e3)
    return times


def ratio(times: dict[str, list[float]], name: str, base: str) -> tuple[float, ...]:
    """One ratio a round, so that both sides met the same machine."""
    return tuple(own / other for own, other in zip(times[name], times[base], strict=True))


def at_width(seed: int, rounds: int) -> dict[str, tuple[float, ...]]:
    """Ratios of our compiled step to torch's, by model size, in a process whose compiler prefers one width."""
    torch.set_num_threads(1)
    found = {}
    for model in (GPT2_SMALL, LITTLE):
        contenders = {
            BASES["compiled"]: torch_master_step(model, seed, fused=True),
            WIDE_STEP: own_step(model, seed, "split-master", compiled=True),
        }
        found[_size(model)] = ratio(alternate(contenders, rounds, seed), WIDE_STEP, BASES["compiled"])
    return found


def both_widths(seed: int, rounds: int) -> Iterator[Figure]:
    """The compiled step of `split-master` under C++ compilers that prefer each width."""
    code = f"import json, benchmarks.optimizer as o; print(json.dumps(o.at_width({seed}, {rounds})))"
    with tempfile.TemporaryDirectory() as folder:
        for width in WIDTHS:
            compiler = Path(folder, f"c++-{width}")
            real = os.environ.get("CXX", "g++")
            compiler.write_text(f'#!/bin/sh\nexec {real} -mprefer-vector-width={width} "$@"\n', encoding="ascii")
            compiler.chmod(0o755)
            done = subprocess.run(
                [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
                env={**os.environ, "CXX": str(compiler)},
                stdout=subprocess.PIPE,
                check=True,
            )
            values = json.loads(done.stdout)
            for model in (GPT2_SMALL, LITTLE):
                name = f"{WIDE_STEP}, vectors of {width} bits / {BASES['compiled']}, {_size(model)}"
                yield Figure(name, "ratio", tuple(values[_size(model)]), LIMITS[model][WIDE_STEP])


def noticing_share(step: Step, rounds: int) -> tuple[float, ...]:
    """The share of each step's CPU that goes into noticing that somebody else wrote to the weights."""
    optimizer = step.__self__  # type: ignore[attr-defined]
    writes = optimizer._external_writes
    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal spent
            started = time.process_time()
            result = function(*arguments)
            spent += time.process_time() - started
            return result

        return call

    writes.adopt, writes.remember = timed(writes.adopt), timed(writes.remember)
    shares = []
    for turn in range(WARM_UP + rounds):
        spent, started = 0.0, time.process_time()
        step()
        if turn >= WARM_UP:
            shares.append(spent / (time.process_time() - started))
    return tuple(shares)


def extra_memory(step: Step) -> float:
    """The rise of resident memory during a step, and the bytes of the bf16 parameters."""
    for _ in range(2):
        step()
    release_scratch()
    # Freed scratch stays in the heap, where the next step would find it again: give it back first.
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    step()
    own = sum(2 * math.prod(shape) for shape in shapes(LITTLE))
    return max(0, _resident_kib("VmHWM") - before) * 1024 / own


def _resident_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def compared(times: dict[str, list[float]], model: Model) -> Iterator[Figure]:
    """Each contender's milliseconds, and our steps' ratios to torch's. model: the stepped model."""
    size = _size(model)
    for name, values in times.items():
        yield Figure(f"{name}, {size}", "CPU ms", tuple(values))
    for name in times:
        base = BASES.get(name.rpartition(" ")[2])
        if base is not None:
            yield Figure(f"{name} / {base}, {size}", "ratio", ratio(times, name, base), LIMITS[model].get(name))


def measure(options: Options) -> Measuring:
    """The gated contenders alternated, then the same over fewer parameters, without --gate all there are."""
    torch.set_num_threads(1)
    rounds = options.rounds or ROUNDS
    notes: list[str] = []
    for form in ("eager", "compiled"):
        share = extra_memory(own_step(LITTLE, options.seed, "plus", compiled=form == "compiled"))
        yield Figure(f"extra memory of plus {form} / the parameters", "ratio", (share,), EXTRA_MEMORY_LIMIT)
    contenders = gated_contenders(GPT2_SMALL, options.seed)
    yield from compared(alternate(contenders, rounds, options.seed), GPT2_SMALL)
    for name in ("plus eager", "plus compiled", "split-master compiled"):
        shares = noticing_share(contenders[name], rounds)
        yield Figure(f"noticing external writes / {name}", "ratio", shares, NOTICING_LIMIT)
    if options.gate:
        contenders = gated_contenders(LITTLE, options.seed)
    else:
        libraries, notes = library_contenders(options.seed)
        contenders = {**further_contenders(options.seed), **libraries}
    yield from compared(alternate(contenders, rounds, options.seed), LITTLE)
    if "avx512f" in Path("/proc/cpuinfo").read_text(encoding="ascii"):
        yield from both_widths(options.seed, rounds)
    else:
        notes.append("no AVX-512 here: vectors have one width")
    notes += [_described(GPT2_SMALL), f"then {_described(LITTLE)}"]
    return notes


def _size(model: Model) -> str:
    return f"{sum(map(math.prod, shapes(model))) / 1e6:.0f} M"


def _described(model: Model) -> str:
    elements = sum(map(math.prod, shapes(model)))
    return f"one AdamW step over {elements:,} bf16 parameters in {len(shapes(model))} tensors, one thread"


if __name__ == "__main__":
    sys.exit(main("optimizer", __doc__.splitlines()[0], measure))
