"""What really became of a training's updates: each step taken again in fp64, over all elements, beside the agent.

Nothing here is the agent's: the rules are written out, and what an optimizer keeps is read from its own state.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from collage_optim import CollageOptimizer
from torch import Tensor

BAD_WORDS = {"not finite", "losing updates", "states are stuck", "decay is lost"}
BAD_WORDS |= {"residuals are off", "steps are off"}
DECAYING = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass
class LayerStep:
    """Sums over all elements of one layer at one step."""

    elements: int
    active: int
    lost: int
    lost_squares: float
    squares: float
    product: float
    effective_squares: float
    oracle_squares: float
    oracle_product: float
    decay_squares: float
    decay_product: float
    kept: int = 0
    dropped: int = 0
    intended_decrements: dict[str, float] = field(default_factory=dict)
    observed_decrements: dict[str, float] = field(default_factory=dict)


def displacement(kind: str, group: dict, state: dict[str, Tensor], weight: Tensor, gradient: Tensor, step: int):
    """(u, states after) of one step in exact arithmetic; `kind` is "adamw", "adam" or "sgd". All fp64."""
    rate, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
    if kind == "sgd":
        gradient = gradient + decay * weight
        momentum = group.get("momentum", 0.0)
        if not momentum:
            return -rate * gradient, {}
        old = state.get("momentum_buffer")
        buffer = gradient if old is None else momentum * old + gradient
        return -rate * buffer, {"momentum_buffer": buffer}
    first, second = group["betas"]
    if kind == "adam":
        gradient = gradient + decay * weight
    zero = torch.zeros_like(weight)
    mean = first * state.get("exp_avg", zero) + (1 - first) * gradient
    square = second * state.get("exp_avg_sq", zero) + (1 - second) * gradient**2
    root = (square / (1 - second**step)).sqrt() + group["eps"]
    moved = -rate * (mean / (1 - first**step)) / root
    if kind == "adamw":
        moved = moved - rate * decay * weight
    return moved, {"exp_avg": mean, "exp_avg_sq": square}


class Truth:
    """Watches an optimizer exactly; `before` and `after` stand around each step."""

    def __init__(self, kind: str, names: dict[Tensor, str], *, decays_apart: bool, random: bool) -> None:
        """decays_apart: the optimizer multiplies the weights by 1 − lr·λ before anything else, as torch's do."""
        self.kind = kind
        self.decays_apart = decays_apart
        self.random = random
        self.names = names
        self.steps: dict[int, dict[str, LayerStep]] = {}
        self._oracle: dict[Tensor, tuple[Tensor, dict[str, Tensor]]] = {}
        self._taken: dict[Tensor, int] = defaultdict(int)
        self._before: dict[Tensor, tuple] = {}
        self._residuals: dict[Tensor, Tensor] = {}

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        self._before = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self._taken[p] += 1
                weight, state = stored_weight(optimizer, p), averages(optimizer, p)
                gradient = p.grad.detach().double()
                u, after = displacement(self.kind, group, state, weight, gradient, self._taken[p])
                own_weight, own_state = self._oracle.get(p, (weight.clone(), state))
                o, own_after = displacement(self.kind, group, own_state, own_weight, gradient, self._taken[p])
                self._oracle[p] = own_weight + o, own_after
                rate = group["lr"] * group["weight_decay"] if self.kind == "adamw" and self.decays_apart else 0.0
                kept = (p.detach() * (1 - rate)).double() - weight if rate else torch.zeros_like(weight)
                left = self._residuals.get(p, torch.zeros_like(weight)) != 0
                gone = left & (weight == p.detach().double())
                counts = int(left.sum()), int(gone.sum())
                self._before[p] = weight, state, after, u, o, -rate * weight, kept, counts

    def after(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        found = {}
        for p, (weight, state, intended, u, o, d, kept, (left, gone)) in self._before.items():
            stored = stored_weight(optimizer, p)
            e = stored - weight
            self._residuals[p] = stored - p.detach().double()
            active, lost = u != 0, (u != 0) & (e == 0)
            own = found[self.names[p]] = LayerStep(
                elements=p.numel(),
                active=int(active.sum()),
                lost=int(lost.sum()),
                lost_squares=float((u[lost] ** 2).sum()),
                squares=float((u * u).sum()),
                product=float((u * e).sum()),
                effective_squares=float((e * e).sum()),
                oracle_squares=float((o * o).sum()),
                oracle_product=float((o * e).sum()),
                decay_squares=float((d * d).sum()),
                decay_product=float((d * kept).sum()),
                kept=left,
                dropped=gone,
            )
            observed = averages(optimizer, p)
            for name, exact in intended.items():
                if name in DECAYING and name in state and name in observed:
                    shrinks = exact.abs() < state[name].abs()
                    change = exact.abs() - state[name].abs()
                    real = observed[name].abs() - state[name].abs()
                    own.intended_decrements[name] = float(change[shrinks].sum())
                    own.observed_decrements[name] = float(real[shrinks].sum())
        self.steps[number] = found

    def over(self, first: int, last: int) -> Whole:
        """Everything between two steps, both included."""
        steps = [layers for number, layers in self.steps.items() if first <= number <= last]
        return Whole(steps, random=self.random)


class Whole:
    """Exact numbers over a stretch of steps."""

    def __init__(self, steps: list[dict[str, LayerStep]], *, random: bool) -> None:
        """random: weights are rounded stochastically, so that what one step loses others bring."""
        self.random = random
        self.steps = steps
        self.layers: dict[str, list[LayerStep]] = defaultdict(list)
        for layers in steps:
            for name, entry in layers.items():
                self.layers[name].append(entry)
        self.all = [entry for entries in self.layers.values() for entry in entries]

    def total(self, name: str, layer: str | None = None) -> float:
        return float(sum(getattr(entry, name) for entry in (self.all if layer is None else self.layers[layer])))

    def edq(self, layer: str | None = None) -> float | None:
        return share(self.total("product", layer), self.total("squares", layer))

    @property
    def lost(self) -> float | None:
        """Share of the intended updates that moved nothing."""
        return share(self.total("lost"), self.total("active"))

    @property
    def lost_squares(self) -> float | None:
        """Their share of Σ u²."""
        return share(self.total("lost_squares"), self.total("squares"))

    @property
    def oracle(self) -> float | None:
        return share(self.total("oracle_product"), self.total("oracle_squares"))

    @property
    def decay_kept(self) -> float | None:
        """What the rounded multiplication by 1 − lr·λ moved, over what it was to move."""
        return share(self.total("decay_product"), self.total("decay_squares"))

    def decrements(self) -> dict[str, float]:
        """Observed over intended, by state."""
        names = {name for entry in self.all for name in entry.intended_decrements}
        found = {}
        for name in sorted(names):
            intended = sum(entry.intended_decrements.get(name, 0.0) for entry in self.all)
            observed = sum(entry.observed_decrements.get(name, 0.0) for entry in self.all)
            ratio = share(observed, intended)
            if ratio is not None:
                found[name] = ratio
        return found

    def losing_layers(self, most: float) -> float:
        """Share of Σ u² of the layers that lose at least so much of their own Σ u²."""
        squares = {name: self.total("squares", name) for name in self.layers}
        losing = [name for name, own in squares.items() if own and self.total("lost_squares", name) >= most * own]
        return sum(squares[name] for name in losing) / (sum(squares.values()) or 1.0)

    def dropped(self) -> list[float]:
        """Share of the residuals that one step left and the next no longer found, by step."""
        kept = [(layers.values(), sum(entry.kept for entry in layers.values())) for layers in self.steps]
        return [sum(entry.dropped for entry in entries) / count if count else 0.0 for entries, count in kept]

    def sick(self) -> set[str]:
        """Every bad word that is plainly true."""
        if not self.defined:
            return set()
        edq, decrements, kept = self.edq() or 0.0, self.decrements().values(), self.decay_kept
        found = set()
        lost = not self.random and (self.lost or 0.0) >= 0.1 and (self.lost_squares or 0.0) >= 2e-3
        if edq < 0.93 or lost or (not self.random and self.losing_layers(0.9) >= 1e-4):
            found.add("losing updates")
        if any(value < 0.8 for value in decrements):
            found.add("states are stuck")
        if kept is not None and kept < 0.3:
            found.add("decay is lost")
        if edq > 1.07 or abs(1 - (self.oracle or 0.0)) > 0.07 or any(value > 1.2 for value in decrements):
            found.add("steps are off")
        if sum(self.dropped()) > 0.6 * len(self.steps):
            found.add("residuals are off")
        return found

    def refuted(self) -> set[str]:
        """Every bad word that is plainly false. Between the two a word is a matter of taste."""
        if not self.defined:
            return set()
        edq, decrements, kept = self.edq() or 0.0, self.decrements().values(), self.decay_kept
        arrives = self.random or (self.lost or 0.0) <= 0.03 or (self.lost_squares or 0.0) <= 2e-4
        found = {"not finite"}
        if max(self.dropped()) < 0.3:
            found.add("residuals are off")
        if edq > 0.97 and arrives and (self.random or self.losing_layers(0.1) <= 1e-6):
            found.add("losing updates")
        if all(value > 0.93 for value in decrements):
            found.add("states are stuck")
        if kept is None or kept > 0.7:
            found.add("decay is lost")
        if edq < 1.03 and abs(1 - (self.oracle or 0.0)) < 0.03 and all(value < 1.07 for value in decrements):
            found.add("steps are off")
        return found

    def healthy(self) -> bool:
        """Whether every bad word is plainly false."""
        return self.refuted() == BAD_WORDS

    @property
    def defined(self) -> bool:
        """Whether anything finite was intended."""
        numbers = (self.edq(), self.oracle, self.lost, self.lost_squares)
        return all(number is not None and math.isfinite(number) for number in numbers)


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def stored_weight(optimizer: torch.optim.Optimizer, p: Tensor) -> Tensor:
    if isinstance(optimizer, CollageOptimizer):
        return optimizer.stored_parameter(p)
    weight = p.detach().double()
    compensation = optimizer.state.get(p, {}).get("kahan_comp")
    return weight.clone() if compensation is None else weight + compensation.double()


def averages(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    state = optimizer.state.get(p, {})
    found = {}
    for name in DECAYING:
        if isinstance(state.get(name), Tensor):
            low = state.get(f"{name}_low")
            found[name] = state[name].detach().double() + (0.0 if low is None else low.double())
    return found
