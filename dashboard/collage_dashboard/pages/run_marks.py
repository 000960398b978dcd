"""What happened to a run while it was trained, as the curves mark it: resumes, alerts, gaps, notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dash import html

from collage_dashboard.descriptions import finite
from collage_monitor import wire

__all__ = ["Marks", "marks_in_words", "marks_of", "place_marks"]

Marks = Sequence[tuple[int, str]]
"""Steps of a run, and what happened there."""
_MOST_MARKS: Final = 12
_UNMARKED: Final = frozenset({"retention", "alert_resolved", "continuation"})
_EVENTS: Final = {
    "conversion": "weights converted",
    "expectation": "expectation broken",
    "resume_loss": "lost at a resume",
    "rank_twice": "rank reported twice",
    "gap": "reports lost",
    "restored": "server restored",
    "replica_mismatch": "replicas differ",
}


def marks_of(events: Sequence[wire.Event], changes: Sequence[wire.EdqChange] = ()) -> list[tuple[int, str]]:
    """The newest of what a curve may have to do with: resumes, alerts, gaps, notes, and abrupt changes of EDQ."""
    found: dict[tuple[int, str], None] = {}
    for event in events:
        first = event.kind == "attempt" and (event.attempt or 1) <= 1
        if event.step is not None and event.kind not in _UNMARKED and not first:
            found[event.step, _what(event)] = None
    marks = list(found)[-_MOST_MARKS:]
    for change in changes[-_MOST_MARKS:]:
        way = "falls" if change.after < change.before else "rises"
        marks.append((change.step, f"EDQ {way} to {change.after:.3f}"))
    return marks


def _what(event: wire.Event) -> str:
    if event.kind == "attempt":
        return f"attempt {event.attempt}"
    if event.kind == "alert":
        return event.text.partition(" ")[0]
    if event.kind == "note":
        return f"note by {event.text[:60]}"
    return _EVENTS.get(event.kind, event.kind.replace("_", " "))


def marks_in_words(marks: Marks) -> Any:
    """What the curves mark, in a line; nothing where nothing happened."""
    if not marks:
        return None
    told = " · ".join(f"{text} at step {step:,}" for step, text in marks)
    return html.P(f"Marked in the curves: {told}", className="crumbs")


def place_marks(marks: Marks, answer: wire.Series) -> list[tuple[float, str]]:
    """The marks on the axis of a curve: each at its first point from there on; what is outside is left out.

    Those at one place are one mark: of two that lie upon each other only one could be read.
    """
    points = [(step, finite(at)) for step, at in zip(answer.steps, answer.positions, strict=True)]
    found: dict[float, str] = {}
    for step, text in marks:
        at = next((at for known, at in points if known >= step and at is not None), None)
        if at is not None and (not answer.first_steps or step >= answer.first_steps[0]):
            place = float(step) if answer.axis == "step" else at
            told = f"{text}, step {step:,}"
            found[place] = f"{found[place]} · {told}" if place in found else told
    return list(found.items())
