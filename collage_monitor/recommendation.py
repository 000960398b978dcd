"""Recommends a precision strategy, and says whether one of two is worth its bytes, with reasons.

Findings count beside the loss, because a state that cannot decay shows late in the loss. The numbers come from
`strategy_results.py`; the comparison's page, the report and MCP answers quote the sentences
(`tests/dashboard/test_recommendation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from collage_monitor.diagnosis import LOST_TOLERANCE, NO_PROBLEM, most_exact, percent
from collage_monitor.seeds import Estimate, SeedValue, difference, mean_over_seeds
from collage_monitor.strategies import strategy_title
from collage_monitor.strategy_results import RunResult, StrategyResult, differences

__all__ = ["Recommendation", "recommendation", "signed", "worth"]

_NOTICEABLE_LOSS_SHARE: Final = 0.005
"""Memory decides between strategies whose losses differ by less than this share of the reference's loss."""
_MANY: Final = 4
"""A sentence lists fewer values than this, and at most so many settings."""


@dataclass(frozen=True)
class Recommendation:
    """A recommended strategy, None if none can be named, with a sentence and its reasons.

    brief: the sentence in at most fifteen words, "" if `text` is short enough.
    """

    chosen: StrategyResult | None
    text: str
    reasons: tuple[str, ...] = ()
    brief: str = ""


def recommendation(results: Sequence[StrategyResult], left_out: int = 0) -> Recommendation:
    """Recommend all strategies without a problem, the one with the fewest bytes first.

    A strategy has a problem if a run is not known to be healthy, or if the 95 % interval of its loss is more than
    `_NOTICEABLE_LOSS_SHARE` above the reference's. Runs that differ in other settings are not compared.

    left_out: how many requested runs are not among the results; the sentence then says how many it covers.
    """
    found = _recommended(results)
    if not left_out:
        return found
    shown = sum(len(result.runs) for result in results)
    how = (
        f"{left_out} {'run is' if left_out == 1 else 'runs are'} left out and may change the answer: "
        "filter the table of runs by project, group or strategy, and pick fewer."
    )
    text = f"Among {shown} of {shown + left_out} runs: {found.text}"
    brief = f"Among {shown} of {shown + left_out} runs: {found.brief}" if found.brief else ""
    return replace(found, text=text, reasons=(how, *found.reasons), brief=brief)


def _recommended(results: Sequence[StrategyResult]) -> Recommendation:
    reference = next((result for result in results if result.is_reference), None)
    reasons = [_reason(result, reference) for result in results]
    if found := differences(results):
        better, keeping = _better_configuration(results), _keeping(results)
        first = better.partition(" (95 %")[0].partition(";")[0].rstrip(".")
        brief = f"{first}{'; it may be chance' if 'chance' in better else ''}. {keeping}".rstrip()
        return Recommendation(None, f"{_differing(found)} {better} {keeping}".rstrip(), tuple(reasons), brief)
    fit = [result for result in results if _problem_of(result, reference) is None]
    if not fit:
        losing = results and not any(result.health == "unknown" for result in results)
        brief = "No compared strategy keeps its updates and reaches the reference's loss." if losing else ""
        return Recommendation(None, _none_fits(results), tuple(reasons), brief)
    text, brief = _sentences(fit, results)
    text += f" {_loss_in_words(fit[0], reference)}"
    return Recommendation(fit[0], text, (*reasons, *_not_compared(fit[0], results)), brief)


def _sentences(fit: Sequence[StrategyResult], results: Sequence[StrategyResult]) -> tuple[str, str]:
    """(the sentence, its short form) that recommends the strategies in `fit`."""
    chosen, keeping = fit[0], sum(result.health == "healthy" for result in results)
    size = f" ({chosen.bytes_per_parameter.value:.3g} bytes a parameter)" if chosen.bytes_per_parameter else ""
    what = "its updates" if keeping == len(fit) else "its updates and the reference's loss"
    if len(results) == 1:
        brief = f"{chosen.title} keeps its updates{size}; nothing is compared with it."
    elif len(fit) == 1:
        brief = f"Use {chosen.title}: the only one that keeps {what}{size}."
    else:
        all_keep = f"{'both' if len(fit) == 2 else f'all {len(fit)}'} keep {what.replace('its', 'their')}"
        brief = f"Use {_either(fit)}: {all_keep}." if len(fit) == 2 else f"Use {chosen.title}: {all_keep}{size}."
        return f"Use {_either(fit)}: {all_keep}, {chosen.title} in the fewest bytes{size}.", brief
    return brief, brief


def _either(results: Sequence[StrategyResult]) -> str:
    """'Collage plus · bfloat16, fp32 master weights · bfloat16 or Plain · float32'"""
    *others, last = [result.title for result in results]
    return f"{', '.join(others)} or {last}"


def worth(one: StrategyResult, other: StrategyResult) -> str:
    """Say what the larger of two strategies gives for its bytes: the difference in loss, and how certain it is.

    "Kahan's loss is 0.0021 lower than Plain's for 2 bytes more (95 %: 0.001 to 0.003, 3 pairs)."
    """
    sizes = [result.bytes_per_parameter.value if result.bytes_per_parameter else None for result in (one, other)]
    if None not in sizes and (sizes[0] or 0) < (sizes[1] or 0):
        return worth(other, one)
    more = round((sizes[0] or 0) - (sizes[1] or 0), 1) if None not in sizes else 0
    bytes_more = f" for {more:.3g} {'byte' if more == 1 else 'bytes'} more" if more else ""
    if found := differences([one, other]):
        return f"{_differing(found)} Their losses say nothing of the strategies."
    ill = [f"{result.title}: {result.health}." for result in (one, other) if result.health not in NO_PROBLEM]
    neither = ["Take neither."] if len(ill) > 1 else []
    gap = difference(_seeds(one), _seeds(other))
    return " ".join([_worth(one.title, f"{other.title}'s{bytes_more}", gap), *ill, *neither])


def _worth(first: str, second: str, gap: Estimate | None) -> str:
    if gap is None:
        return f"{first}'s loss cannot be held against {second} yet: none of both was read at one step."
    if not gap.value:
        return f"{first}'s loss equals {second}."
    by, way = signed(abs(gap.value)).removeprefix("+"), "lower" if gap.value < 0 else "higher"
    said = f"{first}'s loss is {by} {way} than {second}"
    if gap.low is None or gap.high is None:
        return f"{said}. One run each: repeat with other seeds."
    runs = f"{gap.count} pairs" if gap.paired else f"{gap.count} runs each or more"
    if gap.low <= 0 <= gap.high:
        return f"{said}, which may be chance (95 %: {signed(gap.low)} to {signed(gap.high)}, {runs})."
    ends = sorted((abs(gap.low), abs(gap.high)))
    return f"{said} (95 %: {ends[0]:.3g} to {ends[1]:.3g}, {runs})."


def _seeds(result: StrategyResult) -> list[SeedValue]:
    return [SeedValue(run.loss, run.group, run.seed) for run in result.counted if run.loss is not None]


def _differing(found: Mapping[str, Sequence[Any]]) -> str:
    """'These runs differ in learning_rate (0.0003 and 0.001).'"""
    named = [
        f"{name} ({' and '.join(map(str, values))})" if len(values) < _MANY else f"{name} ({len(values)} values)"
        for name, values in list(found.items())[:_MANY]
    ]
    more = f" and {len(found) - _MANY} more entries" if len(found) > _MANY else ""
    return f"These runs differ in {', '.join(named)}{more}."


def _better_configuration(results: Sequence[StrategyResult]) -> str:
    """Say which of two configurations of one strategy has the lower loss, or that no strategy can be named."""
    same = len({(result.strategy, result.dtype) for result in results}) == 1
    losses = [_seeds(result) for result in results]
    if not same or len(results) != 2 or not all(losses):
        return "No strategy is recommended across them: compare runs that differ in their strategy alone."
    first, second = sorted(range(2), key=lambda place: sum(v.value for v in losses[place]) / len(losses[place]))
    gap = difference(losses[second], losses[first])
    assert gap is not None, "both have losses"
    if not gap.value:
        return "Their losses are equal."
    words = f"The loss with {results[first].apart} is lower by {signed(gap.value).removeprefix('+')}"
    if gap.low is None or gap.high is None:
        return f"{words}; from one run each, chance is not known."
    sure = "" if gap.low > 0 else "; it may be chance"
    return f"{words} (95 %: {signed(gap.low)} to {signed(gap.high)}){sure}."


def _keeping(results: Sequence[StrategyResult]) -> str:
    """How many of the runs are known to keep their updates, unless all are: a loss says nothing of that."""
    healths = [run.health for result in results for run in result.runs]
    known = healths.count("healthy")
    if known == len(healths):
        return ""
    return f"{known} of {len(healths)} runs {'is' if known == 1 else 'are'} known to keep updates."


def signed(value: float, digits: int = 3) -> str:
    """Write a difference with its sign, a true minus and `digits` significant digits: '+0.0931', '−0.002'."""
    text = f"{value:+.{digits if abs(value) >= 1e-3 else 1}g}" if abs(value) >= 1e-12 else "0"
    return text.replace("-", "−")


def _loss_in_words(result: StrategyResult, reference: StrategyResult | None) -> str:
    """How the loss compares with the reference's, and how certain that is."""
    if result.is_reference:
        return "It is the reference."
    if reference is None:
        return "What it costs in loss is not known without an fp32 or master-weights run."
    if result.gap is None:
        return "Its loss cannot be compared with the reference's yet."
    gap = result.gap
    words = f"Loss {signed(gap.value)} against {reference.title}"
    if gap.low is None or gap.high is None:
        return f"{words}, one run each: repeat with other seeds."
    over = f"{gap.count} seeds" if gap.paired else f"{gap.count} runs or more each"
    words += f" (95 %: {signed(gap.low)} to {signed(gap.high)}, {over})"
    limit = _noticeable(reference)
    return f"{words}{'; more seeds would tell if it is worse' if limit is not None and gap.high > limit else ''}."


def _reason(result: StrategyResult, reference: StrategyResult | None) -> str:
    """Describe a strategy in a line: its bytes, the difference in loss, and its problems."""
    size = result.bytes_per_parameter
    parts = [f"{size.value:.3g} bytes a parameter"] if size else []
    if result.is_reference:
        parts.append("the reference")
    elif result.gap is not None:
        parts.append(f"loss {signed(result.gap.value)}{_share(result.gap, reference)}")
    parts.append(_problem_of(result, reference) or "healthy")
    if result.set_apart:
        parts.append(f"not counted: {'; '.join(run.why_odd for run in result.set_apart)}")
    return f"{result.title}: {', '.join(parts)}"


def _problem_of(result: StrategyResult, reference: StrategyResult | None) -> str | None:
    """The reason not to recommend a strategy, None if there is none."""
    if result.health != "healthy":
        ill = [run for run in result.runs if run.health == result.health]
        if len(result.runs) == 1:
            return ill[0].short or result.health
        return f"{len(ill)} of {len(result.runs)} runs: {result.health}{_on_average(ill)}"
    limit = _noticeable(reference)
    # Without an interval above the limit the difference may be chance.
    if result.gap is not None and limit is not None and result.gap.low is not None and result.gap.low > limit:
        return f"more than {percent(_NOTICEABLE_LOSS_SHARE)} above the reference"
    return None


def _on_average(runs: Sequence[RunResult]) -> str:
    """', 39.7 % on average', or EDQ where updates are not rounded away; nothing of runs that lose none."""
    lost, edq = (
        mean_over_seeds([run.numbers[key] for run in runs if key in run.numbers])
        for key in ("lost_update_ratio", "edq_ratio")
    )
    if runs[0].health != "losing updates" or lost is None or edq is None:
        return ""
    told = percent(lost.value) if lost.value > LOST_TOLERANCE else f"EDQ {edq.value:.3f}"
    return f", {told} on average"


def _noticeable(reference: StrategyResult | None) -> float | None:
    return _NOTICEABLE_LOSS_SHARE * abs(reference.loss.value) if reference and reference.loss else None


def _share(gap: Estimate, reference: StrategyResult | None) -> str:
    if reference is None or reference.loss is None or reference.loss.value == 0:
        return ""
    share = gap.value / abs(reference.loss.value)
    sign = "" if abs(share) < 5e-5 else "−" if share < 0 else "+"
    return f" ({sign}{percent(abs(share))})"


def _none_fits(results: Sequence[StrategyResult]) -> str:
    if not results:
        return "No run to compare yet."
    if all(result.health == "unknown" for result in results):
        return "No strategy can be named yet: no run is known to keep its updates."
    advice = dict.fromkeys(run.advice for result in results for run in result.runs if run.advice)
    return " ".join(["None of the compared strategies is known to keep its updates.", *advice])


def _not_compared(chosen: StrategyResult, results: Sequence[StrategyResult]) -> list[str]:
    """Name the most exact strategy that needs no more bytes than `chosen`, if it was not compared."""
    size, trained = chosen.bytes_per_parameter, chosen.runs[0].trained
    best = most_exact(trained[0], round(size.value, 1)) if size and len(trained) == 1 else None
    if best is None or any(result.strategy == best.strategy for result in results):
        return []
    known = (
        f"{strategy_title(best.strategy)}: not compared here; in {best.bytes_per_parameter:.3g} bytes a parameter"
    )
    measured = "the most exact on given gradients (docs/how-to/choose-a-strategy.md)"
    return [f"{known} {measured}. Try {best.code.splitlines()[-1]}"]
