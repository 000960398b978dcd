"""The sentences about a run: what is wrong with it, where and since when; then the reasons with all numbers.

Sentences are free, findings are the problems' (`tests/diagnosis/test_headline.py`): raise `WORDS_VERSION` with
them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from collage_monitor.diagnosis.case import EDQ_TOLERANCE, LAYER_TOLERANCE, Case
from collage_monitor.diagnosis.evidence import labelled
from collage_monitor.diagnosis.updates import STILL
from collage_monitor.diagnosis.words import NO_PROBLEM, is_named_by_group, orphans, percent, sentence, silence
from collage_monitor.onset import Onset
from collage_monitor.wire import Finding, Judgement

__all__ = ["judgement_of"]

_COPY_TOLERANCE: Final = 0.5
_NAMED: Final = 3
_TOLD: Final = 2
"""So many layers at most are told by their names."""
_LAYER_CHANGED_SHARE: Final = 0.9
"""Of all layers: when more than these changed, it is the whole model."""
_TOLD_SHARE: Final = 0.25
"""Of the present loss: a fall of less, of a run that lost before, is not told."""
_STEMS: Final = frozenset(
    {"weight", "bias", "layers", "layer", "blocks", "block", "model", "transformer", "h", "module"}
)


def judgement_of(case: Case, findings: Sequence[Finding]) -> Judgement:
    """The first finding's word, and a sentence made of all of them."""
    evidence, measured = case.evidence, _measured(case)
    text = "; ".join(finding.text for finding in findings).rstrip(".")
    said = [f"{text[0].upper()}{text[1:]}.", *_about_layers(case), *_about_copies(case), _basis(case)]
    return Judgement(
        health=findings[0].health,
        short=findings[0].short,
        headline=headline(case, findings),
        text=" ".join(part for part in said if part),
        findings=list(findings),
        measured=measured,
        first_step=evidence.first_step,
        last_step=evidence.last_step,
    )


def headline(case: Case, findings: Sequence[Finding]) -> str:
    """The sentence for a run: 'Loses 57.6 % of its updates (EDQ 0.912), since step 1,020; all 29 layers lose most
    of theirs; exp_avg_sq is stuck, since step 30.'"""
    parts: list[str] = []
    losing = [finding for finding in findings if finding.health == "losing updates"]
    for finding in findings:
        # What a run loses beside a NaN is no help to anybody.
        if finding.health in NO_PROBLEM or "not finite" == findings[0].health != finding.health:
            continue
        if finding not in losing:
            parts.append(finding.short + finding.since_words)
        elif finding is losing[0]:
            parts += _losing(case, finding)
    # What speaks for a healthy run stands in its reasons.
    parts = parts or ["healthy"] if findings[0].health == "healthy" else parts or [own.text for own in findings]
    silent = case.evidence.silent
    if silent is not None and not any(silence(silent) in part for part in parts):
        parts.append(silence(silent))
    return sentence("; ".join(parts))


def _losing(case: Case, told: Finding) -> list[str]:
    """How much is lost, since when, and where."""
    edq = case.number("edq_ratio") if (now := case.moved("edq_ratio")) is None else now
    text = told.short + (" now" if told.now is not None and "now" not in told.short else "")
    if told.key.startswith("edq_window_ratio"):
        steps = told.key.partition("/")[2]
        text += f" (EDQ {told.value:.3f} over {steps} steps)"
    elif told.layer is None and edq is not None and not case.feeds_back:
        text += f" (EDQ {edq:.3f})"
    fall = _fall(case, told)
    text += " in its one measured step" if case.one_step else told.since_words
    text += "" if fall is None or fall.first_changed == told.since else f", more since step {fall.first_changed:,}"
    where = _where(case, fall)
    return [text, where] if where else [text]


def _fall(case: Case, told: Finding) -> Onset | None:
    """The newest abrupt fall of EDQ, if it began what is wrong, or made it notably worse."""
    fall = next((onset for onset in reversed(case.evidence.history.changes) if onset.after < onset.before), None)
    since = told.since or 0
    if fall is None or not told.since_words or fall.settled < since:
        return None
    if fall.last_before < since <= fall.settled:
        return fall
    notable = fall.before - fall.after >= max(EDQ_TOLERANCE, _TOLD_SHARE * (1 - fall.after))
    return fall if notable else None


def _where(case: Case, fall: Onset | None) -> str:
    """Which layers lose most of their updates, or changed then, and how much of the model they are."""
    names = list(case.evidence.layers)
    changed = {change.layer for change in fall.layers if change.after < change.before} if fall else set()
    then = [name for name in names if name in changed]
    losing = set(case.losing_layers())
    found = then or [name for name in names if name in losing]
    if not found:
        return ""
    verb = "changed then" if then else "loses most of its own" if len(found) == 1 else "lose most of theirs"
    if len(found) > _LAYER_CHANGED_SHARE * len(names):
        every = f"all {len(names)}" if len(names) != 2 else "both"
        return f"{every} layers {verb}" if len(found) == len(names) else f"nearly all layers {verb}"
    share = _share_of_elements(case, found)
    if len(found) <= _TOLD:
        return f"{_layers_in_words(found)} {verb}{f' ({share})' if share else ''}"
    place = _layers_in_words(found).removeprefix(f"{len(found)} layers").strip()
    told = ", ".join(filter(None, [place, share]))
    return f"{len(found)} of {len(names)} layers {verb}" + (f": {told}" if told else "")


def _share_of_elements(case: Case, layers: Sequence[str]) -> str:
    """'35.7 % of the elements'; empty where not every layer's are known."""
    sizes = {name: case.number("elements", name) for name in case.evidence.layers}
    if None in sizes.values() or not (whole := sum(size or 0.0 for size in sizes.values())):
        return ""
    return f"{percent(sum(sizes[name] or 0.0 for name in layers) / whole)} of the elements"


def _layers_in_words(names: Sequence[str]) -> str:
    """'layers 5 to 7 (attention)', or the names themselves where they are few, or how many they are."""
    if len(names) <= _TOLD:
        return " and ".join(names)
    places = [re.search(r"\d+", name) for name in names]
    if not all(places):
        return f"{len(names)} layers"
    numbers = sorted({int(place.group()) for place in places if place})
    first, last = numbers[0], numbers[-1]
    kinds = {part for part in re.split(r"[._]", names[0]) if part and not part.isdigit()}
    for name in names[1:]:
        kinds &= set(re.split(r"[._]", name))
    common = [part for part in re.split(r"[._]", names[0]) if part in kinds and part not in _STEMS]
    kind = f" ({common[0]})" if common else ""
    if first == last:
        return f"layer {first}{kind}"
    if numbers == list(range(first, last + 1)):
        return f"layers {first} to {last}{kind}"
    return f"{len(names)} layers between {first} and {last}{kind}"


def _about_layers(case: Case) -> Iterator[str]:
    """Layers worth a look that do not count against the run."""
    without = [name for name in case.evidence.layers if case.number("elements", name) is None]
    if without and len(without) < len(case.evidence.layers) and not case.one_step:
        verb = "layer had" if len(without) == 1 else "layers had"
        yield f"{len(without)} {verb} no gradient in these steps ({_some(without)})."
    if strange := [name for name in case.evidence.layers if is_named_by_group(name)]:
        verb = "is no parameter" if len(strange) == 1 else "are no parameters"
        yield f"{len(strange)} of the optimizer's tensors {verb} of the model ({_some(strange)})."
    coverage = case.watch.coverage if case.watch else None
    if coverage is not None and coverage.orphans and not coverage.strangers:
        yield f"{orphans(coverage)}."
    losing = case.losing_layers()
    still = [name for name in losing if (case.number("lost_update_ratio", name) or 0.0) >= STILL]
    share = case.share_of(still)
    if still and share <= LAYER_TOLERANCE:
        verb = "layer stands" if len(still) == 1 else "layers stand"
        yield f"{len(still)} {verb} still ({_some(still)}): {percent(share)} of Σ u², too little to decide."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def _about_copies(case: Case) -> Iterator[str]:
    """How much of a step reached copies in a lower precision; it does not change the verdict on the training
    itself."""
    changed = labelled(case.model, "cast_changed_ratio")
    recoded = labelled(case.model, "cast_recoded_ratio")
    # Where scales follow the largest weight, each step moves every number a little: only codes tell what arrives.
    hardly = {name: share for name, share in (changed | recoded).items() if share < _COPY_TOLERANCE}
    if case.active and hardly:
        parts = [
            f"{percent(share)} of a {name} copy{' of the weights' if place == 0 else ''}"
            for place, (name, share) in enumerate(hardly.items())
        ]
        yield (
            f"A step changes {', '.join(parts)}. Training is unaffected; an inference server that gets such copies "
            "misses the rest."
        )
    for pair, share in labelled(case.model, "cast_route_ratio").items():
        one, _, other = pair.partition("/")
        step = recoded.get(one, changed.get(one))
        if share > 0:
            against = f", {share / step:.1f} times what a step changes" if step else ""
            yield f"Copies by the routes {one} and {other} differ in {percent(share)} of their codes{against}."


def _basis(case: Case) -> str:
    """Which steps, and how much of the model, the verdict covers."""
    evidence, parts = case.evidence, []
    if evidence.first_step is not None and evidence.last_step is not None:
        one = evidence.first_step == evidence.last_step
        parts.append(
            f"step {evidence.last_step}" if one else f"steps {evidence.first_step} to {evidence.last_step}"
        )
    if (measured := _measured(case)) is not None:
        parts.append(f"{percent(measured)} of the elements")
    if parts and not evidence.layers:
        parts.append("the model as a whole, not its layers")
    return f"Measured: {', '.join(parts)}." if parts else ""


def _measured(case: Case) -> float | None:
    """Share of the elements whose intended update is known, those of silent ranks among them."""
    silent = case.evidence.silent
    if silent is None or case.measured is None:
        return case.measured
    return None if silent.held is None else silent.held * case.measured
