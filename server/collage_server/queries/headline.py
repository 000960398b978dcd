"""One sentence about a run: the problem, its size, since when and where. The reasons stand in its judgement.

Overviews and alerts quote it, lists and pages show it. Words are free, judgements are `collage_monitor.judgement`'s
(`tests/server/test_headline.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from collage_monitor.judgement import NO_PROBLEM, Evidence, Judgement, finite, loses_most, percent, silence

__all__ = [
    "beyond_judgement",
    "headline",
]

_OF_RESIDUALS = "residual_zero_ratio"
"""Of updates that went into a residual that is dropped: the share lost counts them as arrived."""
_NAMED = 2
"""So many layers at most are told by their names."""
_LAYER_CHANGED_SHARE = 0.9
"""Of all layers: when more than these changed, it is the whole model."""


def headline(
    judgement: Judgement,
    evidence: Evidence,
    *,
    since: int | None = None,
    changed: Sequence[str] = (),
    further: int | None = None,
    states_since: Mapping[str, int] | None = None,
    not_finite: Mapping[str, int] | None = None,
) -> str:
    """The sentence for a run.

    since: the first step with the present EDQ, None if it never changed; changed: the layers that changed with it.
    further: the step from which it is worse than then.
    states_since: by optimizer state, the same of its decrement. not_finite: by logged name, the first step at which
    it was NaN or infinite.
    """
    parts = [f"{name} is not finite since step {step:,}" for name, step in (not_finite or {}).items()]
    told = set()
    for finding in judgement.findings:
        if finding.key == _OF_RESIDUALS:
            parts.append(finding.text)
        elif finding.health == "losing updates" and "lost" not in told:
            told.add("lost")
            parts.append(_losing(judgement, evidence, since, changed, further))
        elif finding.health == "states are stuck":
            state = finding.key.partition("/")[2]
            parts.append(f"{state} stuck{_since((states_since or {}).get(state))}")
        elif finding.health not in {"losing updates", *NO_PROBLEM}:
            parts.append(finding.text)
    parts = parts or [finding.text for finding in judgement.findings]
    if evidence.silent is not None and not any(silence(evidence.silent) in part for part in parts):
        parts.append(silence(evidence.silent))
    return _sentence("; ".join(parts)) if parts else judgement.text


def beyond_judgement(sentence: str, judgement: str) -> str:
    """The part of a headline that the judgement beside it lacks; may be empty."""
    clauses = sentence.rstrip(".").split("; ")
    said = judgement.casefold()
    untold = [clause for clause in clauses if clause.casefold() not in said]
    return _sentence("; ".join(untold)) if untold else ""


def _sentence(text: str) -> str:
    """With a capital, except where it begins with a name of the code's."""
    named = "_" in text.split(" ", 1)[0]
    return f"{text if named else text[:1].upper() + text[1:]}."


def _losing(
    judgement: Judgement, evidence: Evidence, since: int | None, changed: Sequence[str], further: int | None
) -> str:
    lost, edq = finite(evidence.model.get("lost_update_ratio")), finite(evidence.model.get("edq_ratio"))
    short, steps = _short_by(judgement)
    rounded_away = any(finding.key == "lost_update_ratio" for finding in judgement.findings)
    # A weight that moves too little has lost no update: told by their number, its run would lose next to nothing.
    if short and (steps or not rounded_away):
        over = f" over {steps} steps" if steps else ""
        text = f"loses {percent(short)} of what its updates intend (EDQ {1 - short:.3f}{over})"
    elif lost is not None:
        text = f"loses {percent(lost)} of its updates" + (f" (EDQ {edq:.3f})" if edq is not None else "")
    else:
        text = "loses updates" + (f" (EDQ {edq:.3f})" if edq is not None else "")
    # The share is over the recent past: where that reaches back before the change, it lost less before it.
    began = evidence.first_step
    text += ", more" if since is not None and began is not None and began < since else ""
    text += _since(since) + ("" if further is None else f", more{_since(further)}")
    where = _where(evidence, changed if since is not None or further is not None else ())
    return f"{text}; {where}" if where else text


def _short_by(judgement: Judgement) -> tuple[float, str]:
    """How far EDQ is below 1 if that is a finding (otherwise 0), and the window's steps ("" for one)."""
    for finding in judgement.findings:
        if finding.health == "losing updates" and finding.key.startswith("edq") and finding.value is not None:
            return 1 - finding.value, finding.key.partition("/")[2]
    return 0.0, ""


def _since(step: int | None) -> str:
    return "" if step is None else f" since step {step:,}"


def _where(evidence: Evidence, changed: Sequence[str]) -> str:
    """Which layers lose most of their updates, or changed then, and how much of the model they are."""
    names = list(evidence.layers)
    then = [name for name in names if name in set(changed)]
    found = then or [name for name in names if loses_most(evidence.layers[name])]
    if not found:
        return ""
    verb = "changed then" if then else "loses most of its own" if len(found) == 1 else "lose most of theirs"
    if len(found) > _LAYER_CHANGED_SHARE * len(names):
        return f"all {len(names)} layers {verb}" if len(found) == len(names) else f"nearly all layers {verb}"
    share = _share_of_elements(evidence, found)
    if len(found) <= _NAMED:
        return f"{_layers_in_words(found)} {verb}{f' ({share})' if share else ''}"
    place = _layers_in_words(found).removeprefix(f"{len(found)} layers").strip()
    told = ", ".join(filter(None, [place, share]))
    return f"{len(found)} of {len(names)} layers {verb}" + (f": {told}" if told else "")


def _share_of_elements(evidence: Evidence, layers: Sequence[str]) -> str:
    """'35.7 % of the elements'; empty where not every layer's are known."""
    sizes = {name: finite(values.get("elements")) for name, values in evidence.layers.items()}
    if None in sizes.values() or not (whole := sum(size or 0.0 for size in sizes.values())):
        return ""
    return f"{percent(sum(sizes[name] or 0.0 for name in layers) / whole)} of the elements"


def _layers_in_words(names: Sequence[str]) -> str:
    """'layers 5 to 7 (attention)', or the names themselves where they are few, or how many they are."""
    if len(names) <= _NAMED:
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


_STEMS = frozenset({"weight", "bias", "layers", "layer", "blocks", "block", "model", "transformer", "h", "module"})
