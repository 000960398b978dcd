"""Bytes per parameter, peak memory and step time by strategy, and the bytes that a compiled step moves."""

from __future__ import annotations

import ctypes
import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import collage_agent as collage
import torch
from collage_demo.models import ByteGPT, loss_of
from collage_optim import STRATEGIES, CollageAdamW
from collage_optim.compiled import TESTED_ELEMENTS
from torch import Tensor

from collage_studies.number_words import UNDEFINED, listed, number, share
from collage_studies.study import Curve, MarkdownTable, Page, Plot, PlotCurve, Record, ReportTarget, Study, Trial

__all__ = ["STUDY"]

REFERENCE: Final = "master-weights"
"""The paper's option D, against which it states its saving of memory."""
CLAIMED: Final = (0.15, 0.23)
"""The paper's saving of memory in practice, as a share (Collage, arXiv 2405.03637)."""
COLLAGE: Final = ("light", "plus")
COMPILED: Final = ("plain", "kahan", "light", "plus", "split-master", "master-weights")
"""Strategies whose compiled step is counted."""
SHAPE: Final = {"layers": 4, "width": 384, "length": 64}
QUICK: Final = {"layers": 2, "width": 64, "length": 32}
BATCHES: Final = (1, 16)
ROUNDS: Final = 15
WARM_UP: Final = 2
RATIO: Final = "step_ratio"
_MIB: Final = 2.0**20


def trials(quick: bool) -> Sequence[Trial]:
    """Every strategy measured eager, and some compiled; quick: three eager, smaller and with fewer rounds."""
    if quick:
        return [_trial(name, "eager", QUICK, 5) for name in ("plain", "light", REFERENCE)]
    eager = [_trial(name, "eager", SHAPE, ROUNDS) for name in STRATEGIES if name in _known()]
    return [*eager, *(_trial(name, "compiled", SHAPE, ROUNDS) for name in COMPILED)]


def _known() -> Sequence[str]:
    """Strategies of this project, without those that other packages add."""
    own = ("plain", "stochastic", "kahan", "light", "light-stochastic", "plus", "full", "fp32-states")
    return (*own, "split-master", "split-master-16bit", "split-master-8bit", "split-24bit-8bit", REFERENCE)


def _trial(strategy: str, form: str, shape: dict[str, int], rounds: int) -> Trial:
    settings = {"strategy": strategy, "form": form, "rounds": rounds, "batches": list(BATCHES), **shape}
    return Trial(name=f"{strategy}, {form}", settings=settings)


def run(trial: Trial, reporting: ReportTarget) -> Record:
    """Measure one strategy in this process; send the ratios of its steps to torch's as scalars."""
    settings = trial.settings
    values: dict[str, float | None] = {}
    curves: dict[str, Curve] = {}
    with collage.init(
        "studies",
        trial.name,
        group=reporting.group,
        config=settings,
        server_url=reporting.server_url,
        dir=reporting.folder,
    ) as reported:
        if settings["form"] == "compiled":
            values = _bytes_moved(settings)
        else:
            for batch in settings["batches"]:
                values |= _peak(settings, batch)
            ratios = _ratios(settings)
            values |= {f"{RATIO}/{name}": ratio for name, ratio in _spread(ratios).items()}
            curves[RATIO] = Curve(list(range(1, len(ratios) + 1)), list(ratios))
            for step, ratio in enumerate(ratios, start=1):
                collage.log({RATIO: ratio}, step=step)
        collage.log({name: value for name, value in values.items() if value is not None and "/" not in name})
    return Record(trial=trial, versions={}, cpu_seconds=0.0, run_id=reported.run_id, values=values, curves=curves)


def _model(settings: dict[str, Any]) -> ByteGPT:
    torch.manual_seed(1)
    shape = {name: settings[name] for name in ("layers", "width", "length")}
    return ByteGPT(**shape).to(torch.bfloat16)


def _step(model: ByteGPT, optimizer: torch.optim.Optimizer, batch: int) -> None:
    inputs = torch.randint(256, (batch, model.length), generator=torch.Generator().manual_seed(2))
    loss_of(model, inputs, inputs).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _peak(settings: dict[str, Any], batch: int) -> dict[str, float | None]:
    """Bytes per parameter from the storages, and how far resident memory rises in a training step, in MiB.

    The rise counts from the process before it had the model, after a small first step has loaded the libraries.
    """
    # Fixed, the threshold sends each tensor of some size to pages of its own, which go back when it is freed.
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(-3, 1 << 16)
    small = ByteGPT(layers=1, width=32, length=settings["length"]).to(torch.bfloat16)
    _step(small, CollageAdamW(small.parameters(), strategy=settings["strategy"]), batch)
    del small
    base = _resident("VmRSS")
    model = _model(settings)
    optimizer = CollageAdamW(model.parameters(), strategy=settings["strategy"])
    for _ in range(WARM_UP):
        _step(model, optimizer, batch)
    _reset_peak()
    _step(model, optimizer, batch)
    peak = _resident("VmHWM")
    parameters = list(model.parameters())
    states = [v for state in optimizer.state.values() for name, v in state.items() if name != "step"]
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in states if isinstance(t, Tensor)}
    elements = sum(parameter.numel() for parameter in parameters)
    stored = sum(parameter.untyped_storage().nbytes() for parameter in parameters) + sum(kept.values())
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return {
        "parameters": float(elements),
        "bytes_per_parameter": (stored + gradients) / elements,
        # Everything stored is read once and written once, the gradient is read once.
        "bytes_moved_at_least": (2 * stored + gradients) / elements,
        f"peak/{batch}": None if base is None or peak is None else (peak - base) / _MIB,
    }


def _resident(field: str) -> float | None:
    """Bytes of this process as Linux counts them; None elsewhere."""
    gc.collect()
    try:
        if field == "VmRSS":
            ctypes.CDLL(None).malloc_trim(0)
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except (AttributeError, OSError):
        return None
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith(field)), None)


def _reset_peak() -> None:
    _resident("VmRSS")
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _ratios(settings: dict[str, Any]) -> list[float]:
    """CPU time of the strategy's step divided by that of torch's foreach AdamW in bfloat16; one ratio per round."""
    ours, theirs = (_with_gradients(_model(settings)) for _ in range(2))
    own = CollageAdamW(ours.parameters(), strategy=settings["strategy"]).step
    foreach = torch.optim.AdamW(theirs.parameters(), foreach=True).step
    for _ in range(WARM_UP):
        _seconds(foreach)
        _seconds(own)
    return [_seconds(own) / _seconds(foreach) for _ in range(settings["rounds"])]


def _with_gradients(model: ByteGPT) -> ByteGPT:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * 1e-3).to(parameter.dtype)
    return model


def _seconds(step: Callable[[], Any]) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def _bytes_moved(settings: dict[str, Any]) -> dict[str, float | None]:
    """The compiler's counts for the compiled step: bytes that its kernels read and write, and its kernels."""
    from torch._inductor import config

    seen = _GraphMetrics()
    torch._logging.set_logs(inductor_metrics=True)
    logger = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    logger.addHandler(seen)
    logger.propagate = False
    model = _with_gradients(_model(settings))
    # What is in the compiler's cache is not counted again.
    with config.patch(force_disable_caches=True):
        optimizer = CollageAdamW(model.parameters(), strategy=settings["strategy"], compiled=True)
        optimizer.step()
    if not seen.graphs:
        return {"compiled_bytes": None, "compiled_kernels": None}
    # The self-test of the square root is compiled first, the step last, for the elements of its own self-test.
    found, kept = seen.graphs[-1], next(iter(optimizer.state.values()))
    moved = found["num_bytes_accessed"] / TESTED_ELEMENTS
    # On a CPU, and only there, 16-bit integers are read and written as 32-bit ones.
    moved -= 4 * sum(isinstance(state, Tensor) and state.dtype == torch.int16 for state in kept.values())
    return {"compiled_bytes": moved, "compiled_kernels": float(len(found["nodes_num_elem"]))}


class _GraphMetrics(logging.Handler):
    """Keeps the numbers that the compiler logs for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = record.args
        if isinstance(found, dict) and "num_bytes_accessed" in found:
            self.graphs.append(found)


def page(records: Sequence[Record]) -> Page:
    """Bytes, peaks and times by strategy, and the saving against fp32 master weights beside the paper's."""
    eager = {r.trial.settings["strategy"]: r for r in records if r.trial.settings["form"] == "eager"}
    compiled = {r.trial.settings["strategy"]: r for r in records if r.trial.settings["form"] == "compiled"}
    ordered = sorted(eager, key=lambda name: eager[name].values["bytes_per_parameter"] or 0.0)
    evidence: list[str | MarkdownTable | Plot] = [_memory_table(eager, ordered), _plot(eager, ordered)]
    evidence += [_time_table(eager, ordered), _moved_table(eager, compiled, ordered)]
    settings = records[0].trial.settings
    elements = eager[ordered[0]].values["parameters"]
    return Page(
        _verdict(eager),
        evidence,
        [
            f"The model is a GPT of {elements:,.0f} parameters, trained on passages of {settings['length']} "
            "bytes. Activations take the same memory under every strategy, so the relative saving shrinks as "
            "batches grow. The paper's models are larger.",
            "The peaks are those of an eager step on a CPU, whose scratch memory does not grow with the model.",
            "Times are CPU seconds of one thread on a busy machine, as ratios of alternated steps. [The cost of a "
            "step](../explanation/cost-of-a-step.md) covers fused and compiled steps.",
            "No CUDA kernel was compiled or run for this page, so it does not cover speed on a GPU.",
        ],
    )


def _saving(eager: dict[str, Record], name: str, key: str) -> float | None:
    own, reference = (eager[which].values.get(key) for which in (name, REFERENCE))
    return 1 - own / reference if own is not None and reference else None


def _memory_table(eager: dict[str, Record], ordered: Sequence[str]) -> MarkdownTable:
    rows = []
    for name in ordered:
        values = eager[name].values
        cells = [f"{number(values['bytes_per_parameter'])}", share(_saving(eager, name, "bytes_per_parameter"))]
        for batch in BATCHES:
            cells += [number(values.get(f"peak/{batch}"), 4), share(_saving(eager, name, f"peak/{batch}"))]
        rows.append([name, *cells])
    head = ["strategy", "bytes a parameter", f"less than {REFERENCE}"]
    for batch in BATCHES:
        head += [f"peak of a step, batch {batch}, MiB", "less"]
    caption = "The table shows the memory of weights, states and gradients, and the peak of a whole training step."
    return MarkdownTable(head, rows, caption)


def _plot(eager: dict[str, Record], ordered: Sequence[str]) -> Plot:
    curves = {}
    for batch in BATCHES:
        known = [(eager[n].values["bytes_per_parameter"], eager[n].values.get(f"peak/{batch}")) for n in ordered]
        drawn = [(size, peak) for size, peak in known if size is not None and peak is not None]
        curves[f"batch {batch}"] = PlotCurve([size for size, _ in drawn], [peak for _, peak in drawn])
    return Plot(
        file="memory.png",
        title="Peak memory of a training step (a dot: a strategy)",
        x="bytes a parameter, from the storages",
        y="peak, MiB",
        curves=curves,
        lines=False,
    )


def _time_table(eager: dict[str, Record], ordered: Sequence[str]) -> MarkdownTable:
    rows = []
    for name in ordered:
        median, low, high = (eager[name].values[f"{RATIO}/{which}"] for which in ("median", "low", "high"))
        rows.append([name, number(median), f"{number(low)}–{number(high)}"])
    caption = "The table shows the CPU time of an eager step divided by that of torch's foreach AdamW in bfloat16."
    return MarkdownTable(["strategy", "ratio, median", "range"], rows, caption)


def _moved_table(eager: dict[str, Record], compiled: dict[str, Record], ordered: Sequence[str]) -> MarkdownTable:
    rows = []
    for name in ordered:
        found = compiled[name].values if name in compiled else {}
        kernels = found.get("compiled_kernels")
        counted = found.get("compiled_bytes")
        rows.append(
            [
                name,
                number(eager[name].values["bytes_moved_at_least"]),
                UNDEFINED if counted is None else f"{counted:.1f}",
                UNDEFINED if kernels is None else f"{kernels:.0f}",
            ]
        )
    caption = (
        "The table shows how many bytes per parameter a step moves between memory and processor. The least is to "
        "read and write every stored number once, and to read the gradient once. The compiler counts the bytes "
        "in the graph of a step compiled for a CPU; no step was compiled for a GPU. A dash marks a strategy that "
        "was not compiled."
    )
    return MarkdownTable(["strategy", "at least", "counted in the compiled step", "kernels"], rows, caption)


def _verdict(eager: dict[str, Record]) -> str:
    stored = [
        f"{share(_saving(eager, name, 'bytes_per_parameter'))} (`{name}`)" for name in COLLAGE if name in eager
    ]
    parts = [f"Weights, states and gradients take {listed(stored)} less memory than with fp32 master weights."]
    low, high = CLAIMED
    for batch in BATCHES:
        found = {name: s for name in COLLAGE if name in eager and (s := _saving(eager, name, f"peak/{batch}"))}
        if not found:
            continue
        more = listed(f"{share(value)} (`{name}`)" for name, value in found.items())
        within = [low <= value <= high for value in found.values()]
        word = (
            "within"
            if all(within)
            else "above"
            if min(found.values()) > high
            else "below"
            if max(found.values()) < low
            else "partly outside"
        )
        parts.append(f"At batch {batch} the peak of a training step falls by {more}, {word} the paper's 15–23 %.")
    ratios = {name: record.values[f"{RATIO}/median"] or 0.0 for name, record in eager.items()}
    slow, fast = max(ratios, key=lambda n: ratios[n]), min(ratios, key=lambda n: ratios[n])
    parts.append(
        f"On a CPU an eager step takes from {number(ratios[fast])} (`{fast}`) to {number(ratios[slow])} (`{slow}`) "
        "times as long as torch's foreach step."
    )
    return " ".join(parts)


STUDY: Final = Study(
    name="memory",
    title="Memory and time of a step",
    short="Weights, states and gradients take 37.5 % less memory under `light` than with fp32 master weights, "
    "and 25 % less under `plus` and `split-master`. On a CPU, eager steps of these strategies are slower than "
    "torch's.",
    question="How many bytes per parameter, how much peak memory in a training step and how much CPU time does "
    "each strategy take? How many bytes would a compiled step move? Do we find the paper's saving of 15–23 % of "
    "memory?",
    method="Each strategy has a process of its own. Bytes are those of the storages of weights and states, and of "
    "a gradient in bfloat16. The peak is the rise of resident memory in a training step (forward, backward, "
    "update) over the process before it had a model. For the time, steps alternate with those of torch's foreach "
    "AdamW on bfloat16 tensors of the same shapes, and each pair gives a ratio.",
    trials=trials,
    run=run,
    page=page,
    repeat_metrics=(),
)
