"""The findings of an audit, in plain words: one function per question, for all parameters together.

A finding's `code` is fixed: scripts read it from `audit --json`. Words are free (`tests/audit/test_findings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal

import torch
from collage_optim import CONVERTED_FROM, LOW_COMPONENT_SUFFIX, PARAMETER_LOW, RESIDUALS_FROM
from collage_optim.names import dtype_name
from collage_optim.numerics.formats import format_of, ulp
from msgspec import Struct
from torch import Tensor

from collage_agent.audit.checkpoint_advice import advised
from collage_agent.audit.checkpoint_parameters import SECOND_MOMENTS, CheckpointParameter, is_narrow, number_of
from collage_agent.sample.state_mappings import counts_to
from collage_agent.sample.stored_parts import leaves_residual
from collage_monitor.wire import Conversion

__all__ = ["AuditFinding", "Severity", "findings_of"]

Severity = Literal["problem", "warning", "note"]

_SHARE_THAT_MATTERS: Final = 0.01
_EXAMPLES: Final = 3
_ENOUGH: Final = 64
_CHUNK: Final = 2**22


class AuditFinding(Struct, frozen=True):
    """One thing that was seen: its severity, name, meaning and parameters, and what to do."""

    severity: Severity
    code: str
    text: str
    layers: list[str]
    action: str = ""


def findings_of(parameters: Sequence[CheckpointParameter]) -> list[AuditFinding]:
    """Every finding about the stored weights and states, the worst first. Reads each tensor once or twice; host
    only."""
    questions: tuple[Callable[[Sequence[CheckpointParameter]], Iterator[AuditFinding]], ...] = (
        _nonfinite,
        _missing_components,
        _zeroed_lows,
        _overlapping_lows,
        _foreign_remainders,
        _cast_remainders,
        _stale_masters,
        _stuck_second_moments,
        _zero_second_moments,
        _single_weights,
        _narrow_counters,
        _cast_states,
        _cast_weights,
        _remainders,
        _converted,
        _no_states,
    )
    found = [finding for question in questions for finding in question(parameters)]
    order = ("problem", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _nonfinite(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    broken = [
        f"{entry.name} ({label})"
        for entry in parameters
        for label, tensor in entry.tensors()
        if not _is_finite(tensor)
    ]
    if broken:
        yield AuditFinding(
            "problem",
            "nonfinite",
            f"NaN or infinity in {len(broken)} tensors: {_some(broken)}",
            broken,
            "go back to an earlier checkpoint; a NaN in an optimizer state spreads with the next step",
        )


def _missing_components(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    """A strategy that the optimizer declares needs components that are not there."""
    missing: dict[str, list[str]] = {}
    for entry in parameters:
        for key in entry.missing:
            what = key
            if key.endswith(LOW_COMPONENT_SUFFIX) and key != PARAMETER_LOW:
                what = f"the low component of {key.removesuffix(LOW_COMPONENT_SUFFIX)}"
            missing.setdefault(f"{what} (strategy {entry.group['strategy']!r})", []).append(entry.name)
    for what, layers in missing.items():
        yield AuditFinding(
            "problem",
            "component-missing",
            f"{what} is missing for {len(layers)} parameters: {_some(layers)}",
            layers,
            "it was dropped on the way; resuming starts it from zero, so that what it held is lost: save the "
            "optimizer's whole state_dict",
        )


def _zeroed_lows(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    zeroed = [
        entry.name
        for entry in parameters
        if (low := entry.remainder if entry.low is None else entry.low) is not None
        and (entry.step or 0) > _residuals_from(entry)
        and not bool((low != 0).any())
        and _rounded(entry) >= _ENOUGH
    ]
    if zeroed:
        yield AuditFinding(
            "problem",
            "residual-zero",
            f"the weight's low component is zero everywhere in {len(zeroed)} parameters, after many steps: "
            f"{_some(zeroed)}",
            zeroed,
            "something dropped or folded it: a torch.compile around the optimizer, or a resume that skipped it",
        )


def _residuals_from(entry: CheckpointParameter) -> float:
    """The step up to which a residual of 0 is no loss; with other libraries the first step may have had a rate of
    0."""
    since = number_of(entry.group.get(RESIDUALS_FROM))
    return 1 if since is None else since


def _rounded(entry: CheckpointParameter) -> int:
    """Elements whose steps leave something beside the weight. Lion's are of the rate's size, which may be whole
    gaps; of other rules, and with decay, they are of any size."""
    rate, decay = number_of(entry.group.get("lr")), number_of(entry.group.get("weight_decay"))
    signs = entry.betas is not None and entry.averages and not SECOND_MOMENTS & entry.averages.keys()
    if entry.weight is None or rate is None or decay != 0 or not signs or not is_narrow(entry.weight.dtype):
        return entry.elements
    return int(leaves_residual(torch.tensor(rate, dtype=torch.float64), entry.weight).sum())


def _converted(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    told: dict[str, list[str]] = {}
    for entry in parameters:
        source, step = entry.group.get(CONVERTED_FROM), number_of(entry.group.get(RESIDUALS_FROM))
        beside = (entry.low, entry.remainder, entry.master)
        if source and step is not None and any(kept is not None for kept in beside):
            conversion = Conversion(source=source, target=str(entry.group.get("strategy")), step=int(step))
            told.setdefault(str(conversion), []).append(entry.name)
    for what, layers in told.items():
        yield AuditFinding("note", "converted", f"{len(layers)} {what}: {_some(layers)}", layers)


def _overlapping_lows(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    """A low component larger than the weight's gap belongs to another weight."""
    foreign = [
        entry.name
        for entry in parameters
        if entry.low is not None
        and entry.paired
        and entry.weight is not None
        and entry.low.dtype == entry.weight.dtype
        and _share(_wider_than_a_gap, entry.low, entry.weight) > _SHARE_THAT_MATTERS
    ]
    if foreign:
        yield AuditFinding(
            "warning",
            "residual-foreign",
            f"the low component is larger than the weight's own gap in {len(foreign)} parameters: {_some(foreign)}",
            foreign,
            "weight and low component come from different moments or models; load both from one checkpoint",
        )


def _foreign_remainders(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    """Any bits complete any weight but 0; where the weight is here in fp32, its own low half is known too."""
    foreign = []
    for entry in parameters:
        weight, remainder = entry.weight, entry.remainder
        if weight is None or remainder is None or remainder.is_floating_point() or not entry.paired:
            continue
        differs = 0.0
        if not is_narrow(weight.dtype):
            differs = _share(_other_low_half, weight, remainder) if remainder.dtype.itemsize == 2 else 0.0
        elif (zeros := int((weight == 0).sum())) >= _ENOUGH:
            differs = _share(_completes_zero, weight, remainder) * entry.elements / zeros
        if differs > _SHARE_THAT_MATTERS:
            foreign.append(entry.name)
    if foreign:
        yield AuditFinding(
            "problem",
            "remainder-foreign",
            f"weight and integer remainder do not belong together in {len(foreign)} parameters: {_some(foreign)}",
            foreign,
            "they come from different moments or models; load both from one checkpoint",
        )


def _cast_remainders(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    cast: dict[str, list[str]] = {}
    for entry in parameters:
        if entry.remainder is not None and entry.remainder.is_floating_point():
            cast.setdefault(f"{entry.remainder_key} has become {dtype_name(entry.remainder.dtype)}", []).append(
                entry.name
            )
    for what, layers in cast.items():
        yield AuditFinding(
            "problem",
            "remainder-cast",
            f"the integer remainder {what} in {len(layers)} parameters, so that most of its bits are lost: "
            f"{_some(layers)}",
            layers,
            "torch's load_state_dict casts states to the weight's dtype; load them as the integers they were",
        )


def _remainders(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    told: dict[str, list[str]] = {}
    for entry in parameters:
        if entry.remainder is not None and not entry.remainder.is_floating_point():
            key = f"{entry.remainder_key} ({dtype_name(entry.remainder.dtype)}) holds {entry.remainder_words}"
            told.setdefault(key, []).append(entry.name)
    for key, layers in told.items():
        yield AuditFinding(
            "note",
            "remainder-kept",
            f"{key} beside {len(layers)} weights: together they are a weight of more bits, kept in two tensors",
            layers,
        )


def _stale_masters(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    stale, rounded = [], []
    for entry in parameters:
        if entry.master is None or entry.weight is None or not is_narrow(entry.weight.dtype):
            continue
        if entry.paired and _share(_differs_when_rounded, entry.master, entry.weight) > _SHARE_THAT_MATTERS:
            stale.append(entry.name)
        elif (
            (entry.step or 0) > max(_residuals_from(entry), 1)
            and _share(_representable, entry.master, entry.weight) == 1
            and _rounded(entry) >= _ENOUGH
        ):
            rounded.append(entry.name)
    if stale:
        yield AuditFinding(
            "problem",
            "master-stale",
            f"the fp32 master weight does not round to the weight in {len(stale)} parameters: {_some(stale)}",
            stale,
            "one of them was changed without the other; the next step writes the master's value back",
        )
    if rounded:
        yield AuditFinding(
            "problem",
            "master-rounded",
            f"the master weight holds nothing beyond the weight's own bits in {len(rounded)} parameters: "
            f"{_some(rounded)}",
            rounded,
            "it was cast to the weight's dtype and back: what the master kept is lost",
        )


def _stuck_second_moments(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    """A decay below half a gap of every number of the format: rounding to nearest gives the old value back."""
    stuck: dict[tuple[str, float], list[CheckpointParameter]] = {}
    for entry in parameters:
        decay = entry.second_decay
        for name, average in entry.averages.items():
            if name not in SECOND_MOMENTS or name in entry.average_lows or not is_narrow(average.dtype):
                continue
            stochastic = entry.declared is not None and entry.declared.stochastic_moment(True)
            if (
                decay is not None
                and not stochastic
                and decay < 2.0 ** -(format_of(average.dtype).mantissa_bits + 2)
            ):
                stuck.setdefault((dtype_name(average.dtype), 1 - decay), []).append(entry)
    for (dtype, beta2), entries in stuck.items():
        layers = list(dict.fromkeys(entry.name for entry in entries))
        yield AuditFinding(
            "problem",
            "second-moment-stuck",
            f"the second moment is one {dtype} number with beta2 = {beta2:.6g} in {len(layers)} parameters: it can "
            f"grow but not decay, so that steps become too small once gradients fall: {_some(layers)}",
            layers,
            f"lower beta2, or {advised(entries, 'states', 'round the second moment stochastically')}",
        )


def _zero_second_moments(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    zeroed, entries = [], []
    for entry in parameters:
        first, second = entry.numbers("exp_avg"), entry.numbers("exp_avg_sq")
        if first is not None and second is not None:
            share = _share(_zero_where_moving, second, first)
            if share > _SHARE_THAT_MATTERS:
                zeroed.append(f"{entry.name} ({share:.0%})")
                entries.append(entry)
    if zeroed:
        yield AuditFinding(
            "problem",
            "second-moment-zero",
            f"exp_avg_sq is 0 where exp_avg is not, in {len(zeroed)} parameters: {_some(zeroed)}",
            zeroed,
            "squares of small gradients fell below the format's range, so that eps alone bounds the step: "
            + advised(entries, "states", "keep the second moment in fp32"),
        )


def _single_weights(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    plain = [entry for entry in parameters if entry.strategy in ("plain", "fp32-states") and entry.has_state]
    if plain:
        dtypes = sorted({dtype_name(entry.weight.dtype) for entry in plain if entry.weight is not None})
        layers = [entry.name for entry in plain]
        yield AuditFinding(
            "warning",
            "single-weight",
            f"{len(layers)} parameters are kept as one {' or '.join(dtypes)} number and nothing else: every update "
            "below half a gap is rounded away, unless rounding is stochastic, which no checkpoint shows",
            layers,
            "see what the learning rate loses (--learning-rate), or watch a run: collage_agent.watch",
        )


def _narrow_counters(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    """Torch's load_state_dict keeps the dtype of a counter that is a tensor."""
    by_dtype: dict[torch.dtype, list[CheckpointParameter]] = {}
    for entry in parameters:
        if entry.counter is not None and counts_to(entry.counter) is not None:
            by_dtype.setdefault(entry.counter.dtype, []).append(entry)
    for dtype, entries in by_dtype.items():
        names = [entry.name for entry in entries]
        most, stands = counts_to(entries[0].counter), max(entry.step or 0 for entry in entries)
        yield AuditFinding(
            "problem",
            "counter-narrow",
            f"the step counter is kept in {dtype_name(dtype)}, which counts to {most:,} and no further: it stands "
            f"at {stands:,} in {len(names)} parameters: {_some(names)}",
            names,
            "the code that saves casts every tensor: leave counters out, and set state['step'] to a float32 tensor "
            "of the right count before this state is loaded; until then bias is corrected for as at that count",
        )


def _cast_states(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    cast = [
        entry.name
        for entry in parameters
        if entry.weight is not None
        and entry.weight.dtype == torch.float32
        and any(is_narrow(average.dtype) for average in entry.averages.values())
    ]
    if cast:
        yield AuditFinding(
            "warning",
            "states-cast",
            f"states are narrower than the fp32 weights in {len(cast)} parameters: {_some(cast)}",
            cast,
            "if that was not meant, the checkpoint or the optimizer casts them: look at the dtype before saving",
        )


def _cast_weights(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    """Weights stored as fp32 that hold nothing beyond 16 bits went through a narrower format."""
    wide = [entry for entry in parameters if entry.weight is not None and entry.weight.dtype == torch.float32]
    told = [entry for entry in wide if entry.elements >= 64 and entry.weight is not None and _varies(entry.weight)]
    for dtype in (torch.bfloat16, torch.float16):
        narrow = torch.zeros((), dtype=dtype)
        if told and all(_share(_representable, _weight(entry), narrow) == 1 for entry in told):
            yield AuditFinding(
                "warning",
                "weights-cast",
                f"all {len(told)} fp32 weights are exact {dtype_name(dtype)} numbers: they were cast on the way",
                [entry.name for entry in told],
                "if the run was to keep fp32 weights, they have been rounded: save them before any cast",
            )
            return


def _no_states(parameters: Sequence[CheckpointParameter]) -> Iterator[AuditFinding]:
    stepped = [entry for entry in parameters if entry.stepped]
    if parameters and not stepped:
        yield AuditFinding(
            "note",
            "weights-only",
            "there is no optimizer state here: how the run keeps averages and master weights is unknown",
            [],
            "pass the folder or file that also holds the optimizer's state_dict",
        )
    missing = [entry.name for entry in stepped if not entry.has_state and not _keeps_no_state(entry)]
    if missing:
        yield AuditFinding(
            "note",
            "no-state",
            f"{len(missing)} parameters have no optimizer state: {_some(missing)}; frozen, never used, or dropped",
            missing,
        )


def _keeps_no_state(entry: CheckpointParameter) -> bool:
    """Whether the group is SGD's without momentum; RMSprop has an `alpha`, too."""
    return number_of(entry.group.get("momentum")) == 0 and "alpha" not in entry.group


def _is_finite(tensor: Tensor) -> bool:
    # torch.isfinite does not know every format of one byte.
    return all(
        bool(torch.isfinite(part.float() if part.dtype.itemsize == 1 else part).all())
        for part in torch.split(tensor.reshape(-1), _CHUNK)
    )


def _share(condition: Callable[[Tensor, Tensor], Tensor], one: Tensor, other: Tensor) -> float:
    """Share of elements for which the condition holds; in chunks, so that memory stays bounded."""
    one, other = one.reshape(-1), other.reshape(-1)
    whole = other.numel() == 1 != one.numel()
    count = 0
    for start in range(0, one.numel(), _CHUNK):
        part = other if whole else other[start : start + _CHUNK]
        count += int(condition(one[start : start + _CHUNK], part).sum())
    return count / one.numel() if one.numel() else 0.0


def _wider_than_a_gap(low: Tensor, weight: Tensor) -> Tensor:
    return low.double().abs() > ulp(weight).double()


def _differs_when_rounded(master: Tensor, weight: Tensor) -> Tensor:
    """Not where a master lies halfway between two numbers of the format: it may be either's."""
    rounded = master.to(weight.dtype)
    exact, shown, nearest = (tensor.to(torch.float64) for tensor in (master, weight, rounded))
    return (rounded != weight) & (2 * exact != shown + nearest)


def _completes_zero(weight: Tensor, remainder: Tensor) -> Tensor:
    return (weight == 0) & (remainder != 0)


def _other_low_half(weight: Tensor, remainder: Tensor) -> Tensor:
    return (weight.view(torch.int32) ^ remainder.view(torch.int16).to(torch.int32)) & 0xFFFF != 0


def _representable(wide: Tensor, narrow: Tensor) -> Tensor:
    return wide.to(narrow.dtype).to(wide.dtype) == wide


def _zero_where_moving(second: Tensor, first: Tensor) -> Tensor:
    return (second == 0) & (first != 0)


def _varies(tensor: Tensor) -> bool:
    return bool((tensor != tensor.reshape(-1)[0]).any())


def _weight(entry: CheckpointParameter) -> Tensor:
    assert entry.weight is not None
    return entry.weight


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _EXAMPLES} more" if len(listed) > _EXAMPLES else ""
    return ", ".join(listed[:_EXAMPLES]) + more
