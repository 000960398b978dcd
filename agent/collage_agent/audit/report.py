"""The audit as a whole: read, look, conclude; as one value, and as text for people."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from collage_agent.audit.findings import Finding, find
from collage_agent.audit.kept import KeptParameter, dtype_name, kept_parameters
from collage_agent.audit.rate import SAFE_LOST_RATIO, RateLoss, add_losses, rate_loss
from collage_agent.audit.reading import read_checkpoint

__all__ = ["Audit", "KeptSummary", "LayerLoss", "audit_checkpoint", "render"]

_WORST: Final = 5
_NO_PROOF: Final = (
    "a checkpoint shows what is kept, not what became of the updates: nothing here proves a run healthy"
)


class KeptSummary(Struct, frozen=True):
    """Parameters that are kept alike: `tensors` is the dtype of each kind of tensor."""

    strategy: str
    tensors: dict[str, str]
    parameters: int
    elements: int
    bytes_per_parameter: float


class LayerLoss(Struct, frozen=True):
    """What the learning rate loses of one parameter; see `RateLoss`."""

    name: str
    elements: int
    lost_ratio: float | None
    estimated_lost_ratio: float | None
    smallest_safe_learning_rate: float | None


class Audit(Struct, frozen=True):
    """What was found in a checkpoint. `bytes_per_parameter` counts weights and states, without gradients."""

    path: str
    files: list[str]
    elements: int
    kept: list[KeptSummary]
    findings: list[Finding]
    learning_rate: float | None
    learning_rate_from: str
    total: LayerLoss | None
    layers: list[LayerLoss]
    notes: list[str]
    conclusion: str


def audit_checkpoint(path: Path, learning_rate: float | None = None) -> Audit:
    """Audit a file or folder. `learning_rate` None: the one in the checkpoint, if there is one.

    Raises:
        CheckpointError: nothing that can be read safely.
        ValueError: a learning rate that is none.
    """
    if learning_rate is not None and not 0 < learning_rate < float("inf"):
        raise ValueError(f"learning_rate={learning_rate}: pass a number above 0")
    checkpoint = read_checkpoint(path)
    kept, notes = kept_parameters(checkpoint)
    origin = "given"
    if learning_rate is None:
        learning_rate, origin = _learning_rate_of(kept)
    losses, told = _losses(kept, learning_rate)
    findings = [*find(kept), *_of_rate(losses, learning_rate)]
    findings.sort(key=lambda finding: ("problem", "warning", "note").index(finding.severity))
    return Audit(
        path=str(path),
        files=checkpoint.files,
        elements=sum(entry.elements for entry in kept),
        kept=_summaries(kept),
        findings=findings,
        learning_rate=learning_rate,
        learning_rate_from=origin,
        total=_layer_loss("", _sum(losses.values())) if losses else None,
        layers=[_layer_loss(name, loss) for name, loss in losses.items()],
        notes=[*checkpoint.notes, *notes, *told],
        conclusion=_conclusion(findings),
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
        lines.append("  nothing that stands out")
    if audit.total is not None:
        lines += ["", *_rate_lines(audit)]
    lines += ["", *(f"note: {note}" for note in audit.notes), audit.conclusion]
    return "\n".join(lines)


def _learning_rate_of(kept: Sequence[KeptParameter]) -> tuple[float | None, str]:
    """The rate with which most weights were stepped; where a schedule has ended at 0, the one it began with."""
    rates: Counter[tuple[float, str]] = Counter()
    for entry in kept:
        for key in ("lr", "initial_lr"):
            if float(entry.group.get(key, 0.0)) > 0:
                rates[float(entry.group[key]), f"{key} of the checkpoint"] += entry.elements
                break
    return rates.most_common(1)[0][0] if rates else (None, "")


def _losses(kept: Sequence[KeptParameter], learning_rate: float | None) -> tuple[dict[str, RateLoss], list[str]]:
    if learning_rate is None:
        return {}, ["no learning rate: pass --learning-rate to see what it would lose"]
    with_states = [entry for entry in kept if entry.has_state]
    if with_states and not any("exp_avg" in entry.averages for entry in with_states):
        return {}, ["the updates of this optimizer are not of the learning rate's size: what it loses is left out"]
    at_random = [entry for entry in kept if entry.declared is not None and entry.declared.stochastic]
    notes = [f"{len(at_random)} parameters are rounded stochastically: no update is lost in the mean"]
    losses = {
        entry.name: loss
        for entry in kept
        if entry not in at_random and (loss := rate_loss(entry, learning_rate)) is not None
    }
    return losses, notes if at_random else []


def _of_rate(losses: dict[str, RateLoss], learning_rate: float | None) -> Iterator[Finding]:
    if not losses or learning_rate is None:
        return
    total = _sum(losses.values())
    ratio = total.lost_ratio if total.estimated_lost_ratio is None else total.estimated_lost_ratio
    if ratio is None or ratio <= SAFE_LOST_RATIO:
        return
    worst = [name for name, loss in losses.items() if (loss.lost_ratio or 0) > SAFE_LOST_RATIO]
    yield Finding(
        "problem" if ratio > 0.5 else "warning",
        "learning-rate-lost",
        f"at learning rate {learning_rate:g}, {ratio:.0%} of the updates stand below half a gap of their weights: "
        "rounding to nearest gives the old weights back",
        worst,
        "keep a low component or a master weight (CollageAdamW, strategy 'plus'), or round stochastically",
    )


def _summaries(kept: Sequence[KeptParameter]) -> list[KeptSummary]:
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[KeptParameter]] = {}
    for entry in kept:
        groups.setdefault((entry.strategy, tuple(_dtypes(entry).items())), []).append(entry)
    return [
        KeptSummary(
            strategy,
            dict(tensors),
            len(entries),
            sum(entry.elements for entry in entries),
            float(sum(_itemsizes(entries[0]))),
        )
        for (strategy, tensors), entries in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def _dtypes(entry: KeptParameter) -> dict[str, str]:
    return {label: dtype_name(tensor.dtype) for label, tensor in entry.tensors()}


def _itemsizes(entry: KeptParameter) -> Iterator[int]:
    return (tensor.dtype.itemsize for _, tensor in entry.tensors())


def _layer_loss(name: str, loss: RateLoss) -> LayerLoss:
    return LayerLoss(
        name, loss.elements, loss.lost_ratio, loss.estimated_lost_ratio, loss.smallest_safe_learning_rate
    )


def _sum(losses: Iterable[RateLoss]) -> RateLoss:
    return functools.reduce(add_losses, losses, RateLoss(0, 0, 0, 0, Counter()))


def _conclusion(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    if counts["problem"] or counts["warning"]:
        told = [f"{count} {word}{'s' * (count > 1)}" for word, count in counts.items() if word != "note"]
        return f"{' and '.join(told)}; {_NO_PROOF}"
    return f"no problem was seen; {_NO_PROOF}: watch the training (collage-monitor run -- python train.py) to know"


def _kept_lines(entry: KeptSummary) -> Iterator[str]:
    yield (
        f"{entry.strategy}: {entry.parameters} parameters, {entry.elements:,} weights, "
        f"{entry.bytes_per_parameter:g} bytes a weight without gradients"
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
