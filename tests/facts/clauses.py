"""What a clause of a sentence claims, recomputed from what was sent: a pattern beside each recomputation.

A clause that holds a number or a name and fits no pattern is an error: a new sentence needs a recomputation here.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.facts.comparing import StrategyGroup
from tests.facts.raw import RawRun
from tests.reference.onset import onset

TOLERANCE = 0.05
"""Of EDQ and of shares lost: what is within it is no loss worth telling."""
SECONDS_BEFORE, SECONDS_AFTER = 120, 60


@dataclass
class About:
    """What a text is about: all runs by name, and the run that its clauses speak of now.

    sick: names of those that have a problem, by how they were made. strategies: of a comparison, by title.
    picked: the step or range of which a reader asks what changed. announced: rows of its table, unchanged: all.
    """

    runs: dict[str, RawRun]
    sick: set[str]
    run: RawRun | None = None
    strategies: dict[str, StrategyGroup] = field(default_factory=dict)
    began_at: float = 0.0
    alerts: tuple[str, ...] = ()
    changed: str = ""
    picked: tuple[int, int] | None = None
    announced: int | None = None
    unchanged: bool = False

    @property
    def the_run(self) -> RawRun:
        assert self.run is not None, "the text does not say of which run it speaks"
        return self.run


Check = Callable[..., None]
CLAUSES: list[tuple[re.Pattern[str], Check]] = []


def says(pattern: str) -> Callable[[Check], Check]:
    """The recomputation of clauses of this form: called with what the text is about, and the pattern's groups."""

    def keep(check: Check) -> Check:
        CLAUSES.append((re.compile(pattern), check))
        return check

    return keep


def tells(
    pattern: str, *numbers: tuple[Callable[..., None], str], near: float = math.inf, most: float = math.inf
) -> None:
    """The recomputation of clauses whose numbers are metrics over the recent past.

    numbers: how each reads, and its key. near: so far from 1 they are at most; most: and all below this.
    """

    def check(about: About, *told: str | None) -> None:
        for text, (reads, key) in zip(told, numbers, strict=False):
            value = about.the_run.metric(key, about.the_run.recent)
            reads(text, value, key)
            assert abs(1 - value) <= near, key
            assert value < most, key

    says(pattern)(check)


def counts(pattern: str, true: Callable[[About], Sequence[int]]) -> None:
    """The recomputation of clauses whose numbers are counts or steps."""

    def check(about: About, *told: str | None) -> None:
        assert [step_of(text or "0") for text in told] == list(true(about)), told

    says(pattern)(check)


def check_clause(about: About, text: str) -> None:
    """Recompute what the clause claims.

    Raises:
        AssertionError: it is false, or no pattern fits it.
    """
    for form in (text, f"{text[:1].lower()}{text[1:]}"):
        for pattern, check in CLAUSES:
            if found := pattern.fullmatch(form):
                check(about, *found.groups())
                return
    names = [*about.runs, *(about.run.layers if about.run else ())]
    claims = re.search(r"\d", text) or any(name in text for name in names)
    assert not claims, f"no recomputation of: {text!r}"


def check_text(about: About, text: str) -> None:
    """Recompute each clause of a text; one that begins with a run's name is about that run."""
    for name in sorted(about.runs, key=len, reverse=True):
        if text == name or text.startswith(f"{name} "):
            about.run, text = about.runs[name], text.removeprefix(name).strip()
            break
    for sentence in text.split(". "):
        for clause in sentence.removesuffix(".").split("; "):
            check_clause(about, clause)


def is_shown(text: str, value: float | None) -> bool:
    """Whether the value reads so at the digits that are there, or from a thousand on in three or four of them."""
    text = text.replace("\u2212", "-").replace(",", "").strip()
    if value is None or math.isnan(value):
        return text in {"–", "NaN"}
    if text.endswith(" %"):
        return is_share(text.removesuffix(" %"), value)
    if bound := re.fullmatch(r"(\S+) or (more|less)", text):
        return value >= float(bound[1]) if bound[2] == "more" else value <= float(bound[1])
    mantissa, _, exponent = text.partition("e")
    digits = len(mantissa.partition(".")[2])
    half = 0.5000001 * 10.0 ** (int(exponent or 0) - digits)
    rounded = abs(value) >= 1e3 and float(text) in {float(f"{value:.{significant}g}") for significant in (3, 4)}
    return abs(float(text) - value) <= half or rounded


def assert_shown(text: str, value: float | None, what: str = "") -> None:
    """The value reads so."""
    assert is_shown(text, value), f"{what}: it says {text}, and is {value}"


def is_share(text: str, value: float) -> bool:
    """Whether the share of 1 reads so in percent: with one decimal, or two where one would hide it."""
    if text.startswith(("<", ">")):
        assert text in {"< 0.01", "> 99.99"}
        return 0 < value < 1e-4 if text.startswith("<") else value > 0.9999
    if text in {"0", "100"}:
        return abs(value - float(text) / 100) < 1e-12
    digits = 2 if f"{100 * value:.1f}" in {"0.0", "100.0"} else 1
    return len(text.partition(".")[2]) == digits and is_shown(text, 100 * value)


def assert_share(text: str, value: float, what: str = "") -> None:
    """A share of 1 reads so, in percent."""
    assert is_share(text, value), f"{what}: it says {text} %, and is {value}"


NUMBER = r"([−-]?[\d,]+(?:\.\d+)?(?:e[−-]?\d+)?)"
PERCENT = r"((?:[<>] )?[\d.]+) %"
STEP = r"([\d,]+)"
LAYER = r"([\w.]+\.(?:weight|bias))"


def step_of(text: str) -> int:
    """A step, as it stands in a text."""
    return int(text.replace(",", ""))


# --- Since when ---


@cache
def onset_of(run: RawRun, key: str, layers: bool = True) -> tuple[Any, ...]:
    """The reference's change point of a metric: (last before, first changed, settled, before, after, layers)."""
    curves = {name: list(run.curve(key, [name]).values()) for name in run.layers} if layers else {}
    found = onset(run.steps, list(run.curve(key).values()), curves, TOLERANCE)
    assert found is not None, f"{key} of {run.created.name} never changed at once"
    return tuple(found)


def now_of(run: RawRun) -> list[int]:
    """The newest five measured steps of the recent past; all of it where it has no more."""
    return run.recent[-5:]


INTERVALS = r"(?:, (?:with )?95 % intervals?)?(?: (?:newest step|now) .+)?"
SINCE = rf"(?:, (from the start)|, since step {STEP}|, since the first measured step \({STEP}\))?"


def first_beyond(curve: Mapping[int, float], bound: float, *, below: bool) -> tuple[int, int] | None:
    """(place, step) from which on the curve stays beyond the bound, by the most of three points; None if it is not
    beyond it at its end, or has one point alone."""
    known = {step: value for step, value in curve.items() if not math.isnan(value)}
    steps, beyond = list(known), [value < bound if below else value > bound for value in known.values()]
    if len(steps) < 2:
        return None
    most = [sum((beyond[:1] + beyond + beyond[-1:])[place : place + 3]) >= 2 for place in range(len(beyond))]
    most[-1] = most[-1] or (len(most) > 2 and most[-2])
    place = max((place + 1 for place, own in enumerate(most) if not own), default=0)
    return None if place == len(steps) else (place, steps[0 if place <= 1 else place])


def check_since(run: RawRun, key: str, bound: float, told: Sequence[str | None], *, below: bool) -> None:
    """Since when the metric is beyond its bound, in one of three forms."""
    start, since, first = told
    found = first_beyond(run.curve(key), bound, below=below)
    assert found is not None
    place, step = found
    if place > 1:
        assert step_of(since or "0") == step, f"{key}: since {told}, not {step}"
    elif start is None:
        assert step_of(first or "0") == step > 1, f"{key}: {told}"
    else:
        assert run.steps[0] == 1


@says(rf"loses {PERCENT} of its updates( now)?(?: \(EDQ {NUMBER}\))?{SINCE}(?:, more since step {STEP})?")
def loses(about: About, lost: str, now: str | None, edq: str | None, *told: str | None) -> None:
    run, (*since, more) = about.the_run, told
    present = run.metric("lost_update_ratio", now_of(run))
    whole = run.metric("lost_update_ratio", run.recent)
    assert_share(lost, present if abs(present - whole) > TOLERANCE else whole, "updates lost")
    assert now is None or abs(present - whole) > TOLERANCE
    if edq is not None:
        found = [run.metric("edq_ratio", steps) for steps in (run.recent, now_of(run))]
        assert_shown(edq, found[abs(found[1] - found[0]) > TOLERANCE], "EDQ")
    if any(since):
        check_since(run, "lost_update_ratio", TOLERANCE, since, below=False)
    if more is not None:
        _, changed, _, before, after, _ = onset_of(run, "edq_ratio")
        assert (changed, after < before) == (step_of(more), True)


@says(rf"all {NUMBER} layers changed then")
def all_changed(about: About, count: str) -> None:
    names = {name for name, *_ in onset_of(about.the_run, "edq_ratio")[5]}
    assert len(names) == len(about.the_run.layers) == int(count), sorted(set(about.the_run.layers) - names)


@says(rf"{LAYER} changed then \({PERCENT} of the elements\)")
def one_changed(about: About, layer: str, share: str) -> None:
    assert layer in {name for name, *_ in onset_of(about.the_run, "edq_ratio")[5]}
    assert_share(share, about.the_run.share_of_elements([layer]))


@says(rf"(\w+) is stuck{SINCE}")
def state_stuck(about: About, state: str, *since: str | None) -> None:
    run, key = about.the_run, f"state_decrement_ratio/{state}"
    assert run.metric(key, run.recent) < 0.9
    if any(since):
        check_since(run, key, 0.9, since, below=True)


@says(rf"(\w+) is not finite,? since step {STEP}")
def scalar_not_finite(about: About, name: str, since: str) -> None:
    logged = about.the_run.scalars[name.lower()]
    bad = [step for step, value in sorted(logged.items()) if not math.isfinite(value)]
    assert bad[0] == step_of(since)
    assert bad == [step for step in sorted(logged) if step >= bad[0]]


# --- The verdict's reasons ---

counts(
    rf"over steps {STEP} to {STEP}{INTERVALS}", lambda about: (about.the_run.recent[0], about.the_run.recent[-1])
)
tells(rf"{NUMBER} weights are not finite{SINCE}", (assert_shown, "nonfinite_params"))
tells(rf"updates arrive \(EDQ {NUMBER}\)", (assert_shown, "edq_ratio"), near=TOLERANCE)
tells(rf"the oracle agrees \({NUMBER}\)", (assert_shown, "edq_oracle_ratio"), near=TOLERANCE)
tells(rf"weight decay moves next to nothing \({PERCENT} of it is kept\)", (assert_share, "decay_ratio"))
tells(rf"the average loses {PERCENT}", (assert_share, "average_lost_ratio"))
tells(
    rf"the average of the weights loses its updates: its EDQ is {NUMBER}, {PERCENT} of them are rounded away, "
    rf"{PERCENT} of its elements ever moved",
    (assert_shown, "average_edq_ratio"),
    (assert_share, "average_lost_ratio"),
    (assert_share, "average_moved_ratio"),
)
for state in ("exp_avg", "exp_avg_sq"):
    decrement = (assert_shown, f"state_decrement_ratio/{state}")
    tells(rf"the state {state} does not decay as it should \({NUMBER}\)", decrement, most=0.9)
    tells(rf"{state} decays as it should \({NUMBER}\)", decrement, near=0.1)


@says(rf"{PERCENT}(?: \({PERCENT} now\))? of the updates are rounded away")
def rounded_away(about: About, lost: str, now: str | None) -> None:
    assert_share(lost, about.the_run.metric("lost_update_ratio", about.the_run.recent))
    if now is not None:
        assert_share(now, about.the_run.metric("lost_update_ratio", now_of(about.the_run)))


@says(
    rf"{NUMBER} layers? (stands? still|loses? most of (?:its|their) updates) \({LAYER}(?:, …)?: "
    rf"{PERCENT} of the measured elements, {PERCENT} of Σ u²\)"
)
def layers_lose(about: About, count: str, how: str, worst: str, elements: str, squares: str) -> None:
    run, steps = about.the_run, about.the_run.recent
    losing = run.losing_layers(steps)
    assert len(losing) == int(count)
    assert worst == max(losing, key=lambda layer: run.missing(layer, steps)), "the one that loses the most is named"
    assert_share(elements, run.share_of_elements(losing))
    assert_share(squares, run.share_of_squares(losing, steps))
    if "still" in how:
        assert all(run.metric("lost_update_ratio", steps, [layer]) > 0.9994 for layer in losing)


@says(rf"{NUMBER} of {NUMBER} layers lose most of theirs: {PERCENT} of the elements")
def layers_of_all_lose(about: About, count: str, of: str, share: str) -> None:
    losing = about.the_run.losing_layers(about.the_run.recent)
    assert (len(losing), len(about.the_run.layers)) == (int(count), int(of))
    assert_share(share, about.the_run.share_of_elements(losing))


@says(rf"{NUMBER} weights are NaN or infinite, in {LAYER} and {NUMBER} more layers")
def weights_not_finite(about: About, count: str, worst: str, others: str) -> None:
    run = about.the_run
    held = {layer: run.metric("nonfinite_params", run.recent, [layer]) for layer in run.layers}
    assert_shown(count, run.metric("nonfinite_params", run.recent))
    assert held[worst] == max(held.values())
    assert sum(value > 0 for value in held.values()) - 1 == int(others)


@says(rf"{PERCENT} of the residuals were 0 again before a step: what they kept was dropped")
def residuals_dropped(about: About, share: str) -> None:
    found = max(about.the_run.curve("residual_dropped_ratio").values())
    assert_share(share, found)


@says(
    rf"every residual was 0 \((\w+)\) before the first step of this launch, {STEP} steps into the training: what "
    r"they held is gone"
)
def residuals_gone(about: About, _state: str, done: str) -> None:
    run = about.the_run
    assert step_of(done) == run.begins[-1] - 1
    assert run.metric("residual_zero_ratio", [run.begins[-1]]) == 1.0


@says(rf"measured: steps {STEP} to {STEP}, {PERCENT} of the elements")
def measured(about: About, first: str, last: str, share: str) -> None:
    run = about.the_run
    assert (step_of(first), step_of(last)) == (run.recent[0], run.recent[-1])
    known = sum(run.total(part, run.recent) for part in ("lost", "distorted", "faithful", "idle"))
    assert_share(share, known / (run.total("elements", run.recent) - run.total("nonfinite", run.recent)))


# --- Advice: what it names costs what it says ---

BYTES = {"split-master": 12, "coupled-9": 9, "coupled-8": 8, "split-master-8bit": 8}
"""Weight 2, gradient 2; the master's low half 2; states 4 and 4, 2 and 2 with rounding, or 1 and 1."""


@says(
    r"try optimizer = collage_agent\.optim\.(\w+)\.from_optimizer\(optimizer, strategy=\"([\w-]+)\"\)"
    r"(?: \((\d+) bytes a parameter\))?(?: or \"([\w-]+)\" \((\d+)\))?"
    r", before the scheduler is built"
)
def advice(_about: About, _kind: str, *named: str | None) -> None:
    for strategy, size in zip(named[::2], named[1::2], strict=True):
        assert strategy is None or size is None or BYTES[strategy] == int(size)


@says(
    r"keep the average in float32, as AveragedModel\(.*\)\.float\(\) does, or round it stochastically"
    r"|try Split .+: how"
)
def advice_without_numbers(_about: About) -> None:
    """On averages, and titles of the strategies that the advice beside it names."""
