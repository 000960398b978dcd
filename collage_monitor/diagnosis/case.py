"""The evidence of one run, with the derived facts that several rules use.

Rules, doubts and words read it. It judges nothing: a derived fact goes here once two rules need it
(`tests/diagnosis/test_judgement.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from collage_monitor.diagnosis.evidence import Evidence, finite, labelled, longest_window
from collage_monitor.metrics import STATE_RATIOS, split_key
from collage_monitor.strategies import STRATEGIES

__all__ = ["Case", "EDQ_TOLERANCE", "LAYER_LOST", "LAYER_TOLERANCE", "LOST_TOLERANCE"]

EDQ_TOLERANCE: Final = 0.05
LOST_TOLERANCE: Final = 0.05
_LONG_WINDOW: Final = 10
"""Steps: a window of fewer may hold the same roundings as one."""
LAYER_LOST: Final = 0.5
"""Of a layer's updates, by their number and by their error: the most of them."""
LAYER_TOLERANCE: Final = 1e-5
"""Layers with no larger share of Σ u² were not to move."""
_FP32_DECAYS: Final = 0.9
"""Of its decrements: rounding in float32 takes less of an average."""
_MOVES: Final = {"lost_update_ratio": LOST_TOLERANCE, **dict.fromkeys(STATE_RATIOS, 0.1)}
"""A change that is told of the newest steps; of other metrics EDQ_TOLERANCE."""


class Case:
    """Evidence, and the facts derived from it about how weights are kept and how well EDQ is known.

    active: whether any update was intended. stochastic: whether weights are rounded at random, at least in some
    layers. differing: whether layers are rounded differently. keeps_more_than_visible: whether the optimizer keeps
    more than the visible weight. couples: whether u holds what rounding took of the weights in steps before.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.model = evidence.model
        self.watch = evidence.watch
        self.fingerprint = evidence.watch.fingerprint if evidence.watch else None
        self.active = sum(self.number(name) or 0.0 for name in ("lost", "distorted", "faithful")) > 0
        self.active = self.active or self.number("edq_ratio") is not None
        names = {self.watch.strategy, self.watch.observed_strategy} if self.watch else set()
        self.couples = any(str(name).startswith("coupled-") for name in names)
        seen = self.fingerprint.stochastic_rounding if self.fingerprint else None
        stochastic = bool(seen) or any(name in STRATEGIES and STRATEGIES[name].stochastic for name in names)
        known = self.watch is None or seen is not None or names != {None, "unknown"}
        self._of_layers = self.fingerprint.layer_rounds_at_random if self.fingerprint else {}
        self._otherwise = stochastic if stochastic or known else None
        self.stochastic = stochastic or any(self._of_layers.values())
        self.differing = bool(self._of_layers)
        self._squares = {name: (self.number("intended_norm", name) or 0.0) ** 2 for name in evidence.layers}
        self.keeps_more_than_visible = bool(
            self.fingerprint and (self.fingerprint.master or self.fingerprint.residual)
        )

    def number(self, key: str, layer: str | None = None) -> float | None:
        """The metric of the model or a layer; None where it is undefined."""
        return finite((self.model if layer is None else self.evidence.layers[layer]).get(key))

    def moved(self, key: str) -> float | None:
        """The metric over the newest steps, if it is no longer that of the recent past, beyond chance; else
        None."""
        whole, now = self.number(key), finite(self.evidence.now.get(key))
        if whole is None or now is None:
            return None
        name, label = split_key(key)
        noise_key = name.replace("_ratio", "_noise_ratio") + (f"/{label}" if label else "")
        noise = 3 * (finite(self.evidence.now.get(noise_key)) or 0.0)
        low, high = (finite(self.evidence.now.get(f"{key}_{end}")) for end in ("low", "high"))
        within = low is not None and high is not None and low <= whole <= high
        return None if within or abs(now - whole) <= _MOVES.get(name, EDQ_TOLERANCE) + noise else now

    def interval(self, key: str) -> tuple[float, float] | None:
        """The 95 % interval of a metric; None where there is none, of one step, and of a mean over what moves."""
        low, high = self.number(f"{key}_low"), self.number(f"{key}_high")
        if low is None or high is None or self.one_step or self.moved(key) is not None:
            return None
        return low, high

    def rounds_at_random(self, layer: str) -> bool | None:
        """Whether the layer's weights are rounded at random; None: not known."""
        return self._of_layers.get(layer, self._otherwise)

    def trains(self, dtype: str) -> bool:
        """Whether the agent reported weights of this dtype among the trained ones."""
        return any(dtype in entry.parameters for entry in (self.watch.trained if self.watch else ()))

    @property
    def arrives_later(self) -> bool:
        """Whether what single steps lose has arrived after several: over a long window little stands still,
        and the weights have gone as far as the oracle's.

        Either alone would not do: large steps move each weight now and then though the small ones are lost.
        """
        moved = self.number("oracle_displacement_ratio")
        return self._moves_in_windows and moved is not None and moved >= 1 - EDQ_TOLERANCE

    @property
    def _moves_in_windows(self) -> bool:
        window = longest_window(self.model, "lost_window_ratio")
        return window is not None and window[0] >= _LONG_WINDOW and window[1] <= LOST_TOLERANCE

    @property
    def feeds_back(self) -> bool:
        """Whether what rounding to nearest takes of a step comes back in later ones, though nothing stands beside
        the weights: then u holds errors of earlier steps, and only the oracle says what was meant.

        All of it comes back, or an average takes it: one in float32 that does not decay as it should.
        """
        loses = (self.number("lost_update_ratio") or 0.0) > LOST_TOLERANCE
        if not loses or self.stochastic or self.keeps_more_than_visible or not self._moves_in_windows:
            return False
        return self.arrives_later or (
            self.number("oracle_displacement_ratio") is not None and self._average_is_written
        )

    @property
    def _average_is_written(self) -> bool:
        states = self.fingerprint.states if self.fingerprint else {}
        averages = labelled(self.model, STATE_RATIOS[0])
        return any(states.get(name) == "float32" and value < _FP32_DECAYS for name, value in averages.items())

    def losing_layers(self) -> list[str]:
        """Layers that round to nearest and lose most of their updates, the largest loss of Σ u² first; none if
        that arrives later."""
        if self.arrives_later or self.feeds_back:
            return []
        moved = [name for name, square in self._squares.items() if square and self.rounds_at_random(name) is False]
        losing = [name for name in moved if (self.number("lost_update_ratio", name) or 0.0) > LAYER_LOST]
        return sorted(
            losing, key=lambda name: -self.share_of([name]) * (1 - (self.number("edq_ratio", name) or 0.0))
        )

    def share_of(self, layers: Iterable[str]) -> float:
        """These layers' share of Σ u²; 0 if no update was intended."""
        return sum(self._squares[name] for name in layers) / (sum(self._squares.values()) or 1.0)

    def lost_where(self, at_random: bool | None) -> tuple[float | None, float | None]:
        """Share of updates lost, and their error, over weights rounded this way.

        Where layers differ, only matching layers count, weighted by elements and Σ u². None: not known, or next to
        nothing intended.
        """
        layers = self.evidence.layers if self.differing else {}
        if not layers:
            alike = None if self.differing else self._otherwise
            of_model = self.number("lost_update_ratio"), self.number("update_error_ratio")
            return of_model if alike is at_random else (None, None)
        everything = elements = lost = squares = error = 0.0
        for name in layers:
            share, square = self.number("lost_update_ratio", name), (self.number("intended_norm", name) or 0.0) ** 2
            everything += square
            if share is None or self.rounds_at_random(name) is not at_random:
                continue
            size = self.number("elements", name) or 0.0
            elements, lost = elements + size, lost + size * share
            squares += square
            error += square * (self.number("update_error_ratio", name) or 0.0) ** 2
        if not elements or squares <= LAYER_TOLERANCE * everything:
            return None, None
        return lost / elements, (error / squares) ** 0.5

    @property
    def one_step(self) -> bool:
        """Whether the evidence is that of a single measured step."""
        return self.evidence.first_step is not None and self.evidence.first_step == self.evidence.last_step

    @property
    def measured(self) -> float | None:
        """Share of the elements of stepped layers whose u is known; those of unwatched optimizers are not."""
        coverage = self.watch.coverage if self.watch else None
        watched = self._measured_of_watched
        if coverage is None or watched is None or not coverage.elsewhere:
            return watched
        return watched * coverage.watched / (coverage.watched + coverage.elsewhere)

    @property
    def _measured_of_watched(self) -> float | None:
        sizes = {name: self.number("elements", name) or 0.0 for name in self.evidence.layers}
        if not any(sizes.values()):
            return self.number("measured_ratio")
        known = (size for name, size in sizes.items() if self.number("measured_ratio", name) is not None)
        return sum(known) / sum(sizes.values())

    @property
    def followed_by_oracle(self) -> float:
        """Share of the elements of stepped layers that the oracle stands for; 1 where its layers are not known."""
        sizes = {name: self.number("elements", name) or 0.0 for name in self.evidence.layers}
        known = sum(size for name, size in sizes.items() if self.number("edq_oracle_ratio", name) is not None)
        return known / sum(sizes.values()) if known else 1.0

    @property
    def all_skipped(self) -> float:
        """How many steps a loss scaler skipped, if it skipped all that could be measured; else 0.

        A fused optimizer is called for a skipped step, too: then it is measured, and all its numbers are undefined.
        """
        return 0.0 if self.number("elements") else self.evidence.skipped

    @property
    def skipped_in_words(self) -> str:
        """That the loss scaler skipped all of these steps."""
        skipped = f"{self.evidence.skipped:,.0f}"
        measured = self.evidence.last_step is not None
        which = f"each measured step, {skipped} in all" if measured else f"all {skipped} steps so far"
        return f"the loss scaler skipped {which}, because gradients were not finite"

    @property
    def idle(self) -> float:
        """Share of the finite elements with u = 0, within [0, 1]: both counts are estimates, and rounded."""
        idle, elements, bad = (self.number(name) for name in ("idle", "elements", "nonfinite"))
        finite_elements = (elements or 0.0) - (bad or 0.0)
        return min(max(idle / finite_elements, 0.0), 1.0) if idle and finite_elements else 0.0

    @property
    def edq_may_be_far_off(self) -> bool:
        """Whether EDQ comes from a sample that gave no interval, and that may have missed large losses:
        |1 − edq_ratio| never exceeds update_error_ratio, by the inequality of Cauchy and Schwarz."""
        sampled, elements, error = (self.number(name) for name in ("sampled", "elements", "update_error_ratio"))
        given = self.number("edq_ratio_low") is not None
        return not (given or sampled is None or elements is None or sampled >= elements) and (
            error is not None and error > 2 * EDQ_TOLERANCE
        )

    def chance(self, key: str) -> float:
        """How far stochastic rounding may move a ratio from 1 by chance: three standard errors. 0 where rounding is
        to nearest, whose errors are not random. `key`: that of the standard error."""
        return 3 * (self.number(key) or 0.0) if self.stochastic else 0.0
