"""One launch for all tensors of a step on a device: tables of addresses, a list of chunks, and the step's kernel.

The kernel is the step itself (`advance_in_wide`), recorded by `device_code.py`; so it has every strategy and rule,
and its bits are the eager step's. Programs find their elements by three tables: where each component of each tensor
begins, how many elements it has, and which chunks there are. The tables stay on the device; what changes from step
to step, the gradients' addresses most of all, is compared on the host and sent again only then.

`base.py` steps with it on CUDA devices after a self-test (`compiled.py`). Nothing waits for the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from collage_optim import integer_codes
from collage_optim.advance import Step, advance_in_wide
from collage_optim.arithmetic import INDEX_FACTOR, State, WideArithmetic, signed
from collage_optim.device_code import CHUNK_ELEMENTS, Recorder, built, kernel_source
from collage_optim.from_host import from_host
from collage_optim.random_numbers import RandomSource, shard_number
from collage_optim.strategies import MASTER_PARAMETER, PARAMETER_LOW
from collage_optim.tensor_step import Member, component_names, stepped_together, wide_dtype

__all__ = ["DeviceStep", "OPTIONS", "WARPS", "launches", "step_source"]

WARPS: Final = 4
_ALIGNED: Final = 16
_NAME: Final = "step"
OPTIONS: Final = {"num_warps": WARPS, "enable_fp_fusion": False}
"""A product and a sum are rounded separately, as in eager steps."""


def launches(device: torch.device) -> bool:
    """Whether steps there are kernels by default; `tests/optim/test_device_step.py` replaces it.

    Not while a CUDA graph is captured: a replay would read its numbers where other ones lie by then.
    """
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class DeviceStep:
    """The kernels of one form of step, one for each dtype of gradients: `Step.launch`.

    step: of that form; only its numbers may differ in the steps that are launched.
    """

    def __init__(self, step: Step) -> None:
        self._form = replace(step, launch=None, compiled=None)
        self._kernels: dict[torch.dtype, Any] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, step: Step, members: list[Member]) -> None:
        """Step these parameters and their states, on one device, in place. What is not contiguous is copied."""
        by_gradient: dict[torch.dtype, list[tuple[State, RandomSource | None]]] = {}
        copied: list[tuple[Tensor, Tensor]] = []
        for parts in stepped_together(step, members):
            position, before = parts[0][0].position, 0
            for member, components in parts:
                elements = components["parameter"].numel()
                if not elements:
                    continue
                dense = {name: tensor.contiguous() for name, tensor in components.items()}
                copied += [
                    (tensor, dense[name])
                    for name, tensor in components.items()
                    if dense[name] is not tensor and name != "gradient"
                ]
                source = None
                if step.seeding is not None:
                    shard = shard_number(member.parameter)
                    source = step.seeding.at(position, shard).from_element(before)
                by_gradient.setdefault(dense["gradient"].dtype, []).append((dense, source))
                before += elements
        for dtype, found in by_gradient.items():
            self._launch(step, dtype, found)
            # Autograd cannot see what a kernel writes.
            written = [tensor for dense, _ in found for name, tensor in dense.items() if name != "gradient"]
            torch.autograd.graph.increment_version(written)
        for tensor, dense_one in copied:
            tensor.copy_(dense_one)

    def _launch(self, step: Step, gradient: torch.dtype, found: list[tuple[State, RandomSource | None]]) -> None:
        if gradient not in self._kernels:
            self._kernels[gradient] = built(_NAME, step_source(self._form, gradient))
        device = found[0][0]["parameter"].device
        columns = {name: [own[name].data_ptr() for own, _ in found] for name in found[0][0]}
        sizes = [own["parameter"].numel() for own, _ in found]
        sources = [(int(own.start), int(own.flipped)) if own else (0, 0) for _, own in found]
        scalars = torch.tensor([float(number) for number in step.scalars.values()], dtype=wide_dtype(step.dtype))
        turned = 0 if step.seeding is None else int(step.seeding.at(0).rotation)
        tables = [
            *(_on_device(numpy.array(column, dtype=numpy.int64), device) for column in columns.values()),
            _on_device(numpy.array(sizes, dtype=numpy.int64), device),
            _on_device(numpy.array(sources, dtype=numpy.int32), device),
        ]
        numbers = from_host(scalars, device), from_host(torch.tensor([turned], dtype=torch.int32), device)
        elements = numpy.array(sizes, dtype=numpy.int64)
        beginnings = numpy.array(list(columns.values()), dtype=numpy.int64) % _ALIGNED
        aligned = ~beginnings.any(axis=0) & (elements % _ALIGNED == 0)
        for alignment, chosen in ((_ALIGNED, aligned), (1, ~aligned)):
            chunks = _chunks(elements, chosen)
            if len(chunks):
                kernel = self._kernels[gradient][(len(chunks),)]
                given = (*tables, _on_device(chunks, device), *numbers)
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    kernel(*given, ALIGNED=alignment, **OPTIONS)


def _chunks(elements: NDArray[numpy.int64], chosen: NDArray[numpy.bool_]) -> NDArray[numpy.int32]:
    """[chunks, 2]: the number of each chosen tensor once for each of its chunks, and the number of the chunk."""
    counts = numpy.where(chosen, -(-elements // CHUNK_ELEMENTS), 0)
    tensors = numpy.repeat(numpy.arange(len(elements)), counts)
    ends = numpy.cumsum(counts)
    within = numpy.arange(len(tensors)) - numpy.repeat(ends - counts, counts)
    return numpy.stack((tensors, within), axis=1).astype(numpy.int32)


def step_source(step: Step, gradient: torch.dtype) -> str:
    """The kernel of a step, of gradients of that dtype. Raises `UnsupportedOperation`."""
    wide = wide_dtype(step.dtype)
    components = _components(step, gradient)
    scalars = {name: torch.empty((), dtype=wide, device="meta") for name in step.scalars}
    drawn = {name: torch.empty((), dtype=torch.int32, device="meta") for name in ("start", "flipped", "rotation")}
    recorder = Recorder(components, {**scalars, **drawn})
    with recorder:
        source = RandomSource(**drawn) if step.seeding is not None else None
        arithmetic = WideArithmetic(None, wide, wide)
        advance_in_wide(step, arithmetic, dict(integer_codes.unpacked(components)), scalars, source)
    numbers = [f"{name} = tl.load(scalars + {place})" for place, name in enumerate(scalars)]
    if step.seeding is not None:
        numbers += [
            f"start = tl.load(sources + 2 * which) + first.to(tl.int32) * {signed(INDEX_FACTOR)}",
            "flipped = tl.load(sources + 2 * which + 1)",
            "rotation = tl.load(turned)",
        ]
    recorder.lines[:0] = numbers
    return kernel_source(_NAME, recorder)


def _components(step: Step, gradient: torch.dtype) -> State:
    weight = torch.empty(CHUNK_ELEMENTS, dtype=step.dtype, device="meta")
    found = {"parameter": weight, "gradient": weight.to(gradient, copy=True)}
    for moment in step.moments:
        storage = step.strategy.moment_storage(moment.second)
        found.update(integer_codes.empty_state(moment.name, storage, moment.second, weight))
    if step.strategy.parameter_state == MASTER_PARAMETER:
        found[MASTER_PARAMETER] = weight.to(torch.float32, copy=True)
    elif step.strategy.parameter_state == PARAMETER_LOW:
        found[PARAMETER_LOW] = integer_codes.empty_low(step.strategy.parameter, weight)
    return {name: found[name] for name in ["parameter", "gradient", *component_names(step.strategy, step.moments)]}


_SENT: dict[tuple[torch.device, int, bytes], Tensor] = {}
_MOST_SENT = 256


def _on_device(table: NDArray[Any], device: torch.device) -> Tensor:
    """A table on the device: the one that was sent before if it is the same.

    Weights and states keep their addresses, and gradients have few: an allocator gives the same memory again.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, table.tobytes())
    found = _SENT.pop(key, None)
    if found is None:
        found = from_host(table, device)
        if len(_SENT) >= _MOST_SENT:
            del _SENT[next(iter(_SENT))]
    _SENT[key] = found
    return found
