"""The audit as a whole: reading, findings, losses at a learning rate, and a conclusion, as one value and as text.

`collage-monitor audit` prints it, and `cure.py` starts from it. The words may change freely, the fields of `Audit`
are what `audit --json` writes (`tests/audit/`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from collage_optim.names import dtype_name
from collage_optim.numerics.formats import format_of, gap_towards
from msgspec import Struct
from torch import Tensor

from collage_agent.audit.checkpoint_advice import advised
from collage_agent.audit.checkpoint_files import Checkpoint
from collage_agent.audit.checkpoint_parameters import CheckpointParameter, checkpoint_parameters, number_of
from collage_agent.audit.findings import AuditFinding, findings_of
from collage_agent.audit.split_layouts import read_checkpoint

__all__ = [
    "Audit",
    "KeptSummary",
    "LostAtRate",
    "ParameterLost",
    "SAFE_LOST_RATIO",
    "add_lost",
    "audit_checkpoint",
    "check_learning_rate",
    "lost_at_rate",
    "render",
]

SAFE_LOST_RATIO: Final = 0.1
"""A learning rate is called safe here if no larger share of the weights stands too coarse for it."""
_CHUNK: Final = 2**22
_BOTTOM: Final = -400
_WORST: Final = 5
_NOT_UNDERSTOOD: Final = "not understood"
_NO_PROOF: Final = (
    "a checkpoint shows what is kept, not what became of the updates: nothing here proves a run healthy"
)


@dataclass(frozen=True)
class LostAtRate:
    """How many weights an update of the learning rate's size cannot move, by rounding to nearest.

    lost: elements with |u| = learning rate below half the gap from the stored weight. estimated: the same with
    |u| from the checkpoint's own averages, out of `estimated_of` elements with u != 0; 0 where there are none.
    half_gaps: number of elements by exponent k of half a gap, 2**k.
    """

    elements: int
    lost: int
    estimated: int
    estimated_of: int
    half_gaps: Counter[int]

    @property
    def lost_ratio(self) -> float | None:
        """The share of weights that an update as large as the learning rate does not move."""
        return self.lost / self.elements if self.elements else None

    @property
    def estimated_lost_ratio(self) -> float | None:
        """The same share with the update sizes that the checkpoint's averages imply."""
        return self.estimated / self.estimated_of if self.estimated_of else None

    @property
    def smallest_safe_learning_rate(self) -> float | None:
        """The smallest update size with which at most SAFE_LOST_RATIO of the weights do not move; 0: any."""
        allowed = SAFE_LOST_RATIO * self.elements
        for exponent, count in sorted(self.half_gaps.items(), reverse=True):
            allowed -= count
            if allowed < 0:
                return math.ldexp(1.0, exponent) if exponent > _BOTTOM else 0.0
        return None


def lost_at_rate(parameter: CheckpointParameter, learning_rate: float) -> LostAtRate | None:
    """The losses of one parameter at steps of this size; None if its format is unknown or there is no weight.

    The grid is that of the fp32 master weight, else of the low component where it is not 0 (an update much
    smaller than the weight lands there), else of the weight, made finer by an integer remainder. The gap is taken
    in the update's direction, which
    the first moment gives, else away from zero. Weight decay is left out. Synchronises nothing but the host.
    """
    weight = parameter.weight if parameter.master is None else parameter.master
    if weight is None or not _is_known(weight) or (parameter.low is not None and not _is_known(parameter.low)):
        return None
    total = LostAtRate(0, 0, 0, 0, Counter())
    for part in _parts(parameter, weight):
        total = add_lost(total, _lost_of(*part, parameter, learning_rate))
    return total


def add_lost(one: LostAtRate, other: LostAtRate) -> LostAtRate:
    """Both together: counts add."""
    return LostAtRate(
        one.elements + other.elements,
        one.lost + other.lost,
        one.estimated + other.estimated,
        one.estimated_of + other.estimated_of,
        one.half_gaps + other.half_gaps,
    )


def _parts(
    parameter: CheckpointParameter, weight: Tensor
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]]:
    """Weight, low component, first and second moment, flat and in chunks that bound the memory."""
    adam = parameter.paired and ("betas" not in parameter.group or parameter.betas is not None)
    second = parameter.numbers("exp_avg_sq") if adam else None
    first = parameter.numbers("exp_avg") if second is not None else None
    low = parameter.low if parameter.master is None else None
    second_low = parameter.average_lows.get("exp_avg_sq")
    if second_low is not None and not second_low.is_floating_point():
        second_low = None  # In the numbers.
    flat = [None if tensor is None else tensor.reshape(-1) for tensor in (weight, low, first, second, second_low)]
    for start in range(0, weight.numel(), _CHUNK):
        w, r, m, v, v_low = (None if tensor is None else tensor[start : start + _CHUNK] for tensor in flat)
        assert w is not None
        if v is not None:
            v = v.double() if v_low is None else v.double() + v_low.double()
        yield w, r, None if m is None else m.double(), v


def _lost_of(
    weight: Tensor,
    low: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    parameter: CheckpointParameter,
    learning_rate: float,
) -> LostAtRate:
    direction = torch.zeros(()) if first is None else -first
    half_gap = 0.5 * gap_towards(weight, direction)
    if low is not None:
        # A pair whose low component is 0 can take up an update of any size in it.
        fine = 0.5 * gap_towards(low, direction)
        half_gap = torch.where(low == 0, torch.full_like(fine, math.ldexp(1.0, _BOTTOM)), fine)
    elif parameter.master is None:
        half_gap = half_gap / parameter.units_of_gap
    finite = torch.isfinite(half_gap)
    half_gap = half_gap[finite]
    exponents = (torch.frexp(half_gap).exponent - 1 - _BOTTOM).long()
    counts = torch.bincount(exponents) if exponents.numel() else torch.zeros(0)
    half_gaps = Counter({index + _BOTTOM: int(count) for index, count in enumerate(counts.tolist()) if count})
    estimated = estimated_of = 0
    if first is not None and second is not None:
        sizes = (learning_rate * _unit_steps(first, second, parameter))[finite]
        estimated_of = int((sizes > 0).sum())
        estimated = int(((sizes > 0) & (sizes < half_gap)).sum())
    return LostAtRate(half_gap.numel(), int((half_gap > learning_rate).sum()), estimated, estimated_of, half_gaps)


def _unit_steps(first: Tensor, second: Tensor, parameter: CheckpointParameter) -> Tensor:
    """|u| / learning rate of Adam's next step, if the averages stayed as they are, fp64."""
    beta1, beta2 = parameter.betas or (0.9, 0.999)
    step, eps = parameter.step or 10**6, number_of(parameter.group.get("eps"))
    first, second = first / (1 - beta1**step), second / (1 - beta2**step)
    return first.abs() / (second.clamp(min=0).sqrt() + (1e-8 if eps is None else eps))


def _is_known(tensor: Tensor) -> bool:
    try:
        format_of(tensor.dtype)
    except TypeError:
        return False
    return True


class KeptSummary(Struct, frozen=True):
    """Parameters that are kept alike: `tensors` is the dtype of each kind of tensor."""

    strategy: str
    tensors: dict[str, str]
    parameters: int
    elements: int
    bytes_per_parameter: float


class ParameterLost(Struct, frozen=True):
    """The losses of one parameter at the learning rate; see `LostAtRate`."""

    name: str
    elements: int
    lost_ratio: float | None
    estimated_lost_ratio: float | None
    smallest_safe_learning_rate: float | None


class Audit(Struct, frozen=True):
    """The findings in a checkpoint. `bytes_per_parameter` counts weights and states, without gradients."""

    path: str
    files: list[str]
    elements: int
    kept: list[KeptSummary]
    findings: list[AuditFinding]
    learning_rate: float | None
    learning_rate_from: str
    total: ParameterLost | None
    layers: list[ParameterLost]
    notes: list[str]
    conclusion: str


def check_learning_rate(learning_rate: float | None) -> None:
    """Raise ValueError for a learning rate that is none."""
    if learning_rate is not None and not 0 < learning_rate < float("inf"):
        raise ValueError(f"learning_rate={learning_rate}: pass a number above 0")


def audit_checkpoint(path: Path, learning_rate: float | None = None) -> Audit:
    """Audit a file or folder. `learning_rate` None: the one in the checkpoint, if there is one.

    Raises:
        CheckpointError: nothing that can be read safely.
        ValueError: a learning rate that is none.
    """
    check_learning_rate(learning_rate)
    checkpoint = read_checkpoint(path, in_part=True)
    if not checkpoint.understood:
        return _of_unknown_layout(path, checkpoint)
    parameters, notes = checkpoint_parameters(checkpoint)
    origin = "given"
    if learning_rate is None:
        learning_rate, origin = _learning_rate_of(parameters)
    losses, told = _losses(parameters, learning_rate)
    findings = [*findings_of(parameters), *_of_rate(parameters, losses, learning_rate)]
    findings.sort(key=lambda finding: ("problem", "warning", "note").index(finding.severity))
    return Audit(
        path=str(path),
        files=checkpoint.files,
        elements=sum(entry.elements for entry in parameters if entry.weight is not None or not checkpoint.weights),
        kept=_summaries(parameters),
        findings=findings,
        learning_rate=learning_rate,
        learning_rate_from=origin,
        total=_parameter_lost("", _sum(losses.values())) if losses else None,
        layers=[_parameter_lost(name, loss) for name, loss in losses.items()],
        notes=[*checkpoint.notes, *notes, *told],
        conclusion=_conclusion(findings),
    )


def _of_unknown_layout(path: Path, checkpoint: Checkpoint) -> Audit:
    """What there is, and no finding: what the optimizer keeps beside the weights is not known."""
    parameters, _ = checkpoint_parameters(checkpoint)
    return Audit(
        path=str(path),
        files=checkpoint.files,
        elements=sum(entry.elements for entry in parameters),
        kept=_summaries(parameters),
        findings=[],
        learning_rate=None,
        learning_rate_from="",
        total=None,
        layers=[],
        notes=checkpoint.notes,
        conclusion=(
            f"{_NOT_UNDERSTOOD}: the optimizer is saved in {checkpoint.layout}'s layout, so nothing is said of "
            "master weights, averages and rates; gather it into one state dict with that library's own tools, and "
            "audit that"
        ),
    )


def render(audit: Audit) -> str:
    """The audit in plain words."""
    lines = [f"{audit.path}: {audit.elements:,} weights in {', '.join(audit.files)}", "", "kept"]
    lines += [f"  {line}" for entry in audit.kept for line in _kept_lines(entry)]
    lines += ["", "found"]
    for finding in audit.findings:
        lines.append(f"  {finding.severity}: {finding.text}")
        if finding.action:
            lines.append(f"    what to do: {finding.action}")
    if not audit.findings:
        unread = audit.conclusion.startswith(_NOT_UNDERSTOOD)
        lines.append("  nothing was looked for" if unread else "  nothing that stands out")
    if audit.total is not None:
        lines += ["", *_rate_lines(audit)]
    lines += ["", *(f"note: {note}" for note in audit.notes), audit.conclusion]
    return "\n".join(lines)


def _learning_rate_of(parameters: Sequence[CheckpointParameter]) -> tuple[float | None, str]:
    """The rate with which most weights were stepped; where a schedule has ended at 0, the one it began with."""
    rates: Counter[tuple[float, str]] = Counter()
    for entry in parameters:
        for key in ("lr", "initial_lr"):
            rate = number_of(entry.group.get(key))
            if rate is not None and rate > 0:
                rates[rate, f"{key} of the checkpoint"] += entry.elements
                break
    return rates.most_common(1)[0][0] if rates else (None, "")


def _losses(
    parameters: Sequence[CheckpointParameter], learning_rate: float | None
) -> tuple[dict[str, LostAtRate], list[str]]:
    if learning_rate is None:
        return {}, ["no learning rate: pass --learning-rate to see what it would lose"]
    stepped = [entry for entry in parameters if entry.stepped]
    judged = [entry for entry in stepped or parameters if not stepped or _is_like_adam(entry)]
    if stepped and not judged:
        return {}, ["the updates of this optimizer are not of the learning rate's size: what it loses is left out"]
    notes = []
    if left_out := len(stepped or judged) - len(judged):
        notes.append(f"the updates of {left_out} parameters are not of the learning rate's size: they are left out")
    at_random = [entry for entry in judged if entry.declared is not None and entry.declared.stochastic_parameter]
    if at_random:
        notes.append(f"{len(at_random)} parameters are rounded stochastically: no update is lost in the mean")
    losses = {
        entry.name: loss
        for entry in judged
        if entry not in at_random and (loss := lost_at_rate(entry, learning_rate)) is not None
    }
    return losses, notes


def _is_like_adam(entry: CheckpointParameter) -> bool:
    """Whether updates are about as large as the learning rate, by the options of the group or by Adam's state."""
    return "betas" in entry.group or "exp_avg" in entry.averages


def _of_rate(
    parameters: Sequence[CheckpointParameter], losses: dict[str, LostAtRate], learning_rate: float | None
) -> Iterator[AuditFinding]:
    if not losses or learning_rate is None:
        return
    total = _sum(losses.values())
    ratio = total.lost_ratio if total.estimated_lost_ratio is None else total.estimated_lost_ratio
    if ratio is None or ratio <= SAFE_LOST_RATIO:
        return
    worst = [name for name, loss in losses.items() if (loss.lost_ratio or 0) > SAFE_LOST_RATIO]
    yield AuditFinding(
        "problem" if ratio > 0.5 else "warning",
        "learning-rate-lost",
        f"at learning rate {learning_rate:g}, {ratio:.0%} of the updates stand below half a gap of their weights: "
        "rounding to nearest gives the old weights back",
        worst,
        advised([entry for entry in parameters if entry.name in worst], "weights", "round stochastically"),
    )


def _summaries(parameters: Sequence[CheckpointParameter]) -> list[KeptSummary]:
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[CheckpointParameter]] = {}
    for entry in parameters:
        groups.setdefault((entry.strategy, tuple(_dtypes(entry).items())), []).append(entry)
    return [
        KeptSummary(
            strategy,
            dict(tensors),
            len(entries),
            sum(entry.elements for entry in entries),
            _bytes_per_weight(entries),
        )
        for (strategy, tensors), entries in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def _dtypes(entry: CheckpointParameter) -> dict[str, str]:
    return {label: dtype_name(tensor.dtype) for label, tensor in entry.tensors()}


def _bytes_per_weight(entries: Sequence[CheckpointParameter]) -> float:
    kept = ({id(tensor): tensor for _, tensor in entry.tensors()} for entry in entries)
    held = sum(tensor.numel() * tensor.dtype.itemsize for tensors in kept for tensor in tensors.values())
    return held / (sum(entry.elements for entry in entries) or 1)


def _parameter_lost(name: str, loss: LostAtRate) -> ParameterLost:
    return ParameterLost(
        name, loss.elements, loss.lost_ratio, loss.estimated_lost_ratio, loss.smallest_safe_learning_rate
    )


def _sum(losses: Iterable[LostAtRate]) -> LostAtRate:
    return functools.reduce(add_lost, losses, LostAtRate(0, 0, 0, 0, Counter()))


def _conclusion(findings: Sequence[AuditFinding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    if counts["problem"] or counts["warning"]:
        told = [f"{count} {word}{'s' * (count > 1)}" for word, count in counts.items() if word != "note"]
        return f"{' and '.join(told)}; {_NO_PROOF}"
    return f"no problem was seen; {_NO_PROOF}: watch the training (collage-monitor run -- python train.py) to know"


def _kept_lines(entry: KeptSummary) -> Iterator[str]:
    yield (
        f"{entry.strategy}: {entry.parameters} parameters, {entry.elements:,} weights, "
        f"{entry.bytes_per_parameter:.4g} bytes a weight without gradients"
    )
    yield "    " + ", ".join(f"{label} {dtype}" for label, dtype in entry.tensors.items())


def _rate_lines(audit: Audit) -> Iterator[str]:
    total = audit.total
    assert total is not None
    yield f"at learning rate {audit.learning_rate:g} ({audit.learning_rate_from})"
    yield f"  updates as large as the rate: {_percent(total.lost_ratio)} of the weights do not move"
    if total.estimated_lost_ratio is not None:
        yield f"  updates as the averages imply: {_percent(total.estimated_lost_ratio)} do not move"
    safe = total.smallest_safe_learning_rate
    if safe is not None:
        limit = f"{safe:.3g}" if safe else "any"
        yield f"  smallest rate at which at most {SAFE_LOST_RATIO:.0%} do not move: {limit}"
    worst = sorted(audit.layers, key=lambda layer: -(layer.estimated_lost_ratio or layer.lost_ratio or 0.0))
    for layer in worst[:_WORST]:
        share = layer.lost_ratio if layer.estimated_lost_ratio is None else layer.estimated_lost_ratio
        if share:
            yield f"    {layer.name}: {_percent(share)}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"
