"""What ten thousand steps of rounding leave: every strategy beside fp64 AdamW, on the same gradients.

`python -m benchmarks.accumulation` runs 37 courses of training under several β₂ and prints the largest errors of
each kind of course, then all of them; `--write docs/numerics.md` puts both between that
page's markers; `--gate` ends with 1 when a stated error is exceeded.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from collage_optim import STRATEGIES, CollageAdamW, Scalar
from collage_optim.update_rules import AdamRule, Group
from torch import Tensor

from benchmarks._harness import machine, versions
from tests.reference.adamw import ReferenceAdamW
from tests.reference.streams import COURSES, Course, Courses

ELEMENTS = 128
BETA2 = (0.95, 0.99, 0.999)
WEIGHT_DECAY = 0.01
START, END = "<!-- accumulation -->", "<!-- end of accumulation -->"

KINDS: Mapping[str, Callable[[Course], bool]] = {
    "drift": lambda course: course.kind not in ("zero-mean", "constant") and course.rate > 1e-4,
    "fine-tuning": lambda course: course.kind != "zero-mean" and course.rate < 1e-4,
    "constant": lambda course: course.kind == "constant",
    "zero-mean": lambda course: course.kind == "zero-mean" and course.rate > 1e-4,
    "zero-mean, fine-tuning": lambda course: course.kind == "zero-mean" and course.rate < 1e-4,
}
"""Which courses are judged together, by the largest error among them."""
STATED: Mapping[str, tuple[float, float, float, float, float]] = {
    "split-master": (3e-4, 3e-4, 3e-4, 5e-4, 5e-3),
    "split-master-16bit": (6e-3, 6e-3, 2e-3, 1.3e-2, 1.3e-2),
    "coupled-9": (5e-4, 5e-4, 1e-4, 2e-3, 4e-3),
    "coupled-8": (6e-3, 5e-3, 1e-3, 2e-2, 2e-2),
    "split-master-8bit": (4e-2, 4e-2, 1e-2, 6e-2, 6e-2),
    "coupled-7": (2e-2, 2e-2, 1e-3, 4e-2, 5e-2),
}
"""What each must keep to, by kind, at β₂ = 0.999."""


@dataclass
class Result:
    """The displacement's error of one strategy in one course: relative, in the 2-norm, after the last step."""

    course: str
    beta2: float
    strategy: str
    error: float


@dataclass(frozen=True)
class _ScheduledRule(AdamRule):
    """AdamW whose learning rate is a vector: each element has that of its course."""

    courses: Courses | None = None

    def scalars(self, group: Group, step: int) -> dict[str, Scalar]:
        numbers = super().scalars(group, step)
        assert self.courses is not None
        rates = self.courses.rates(step)
        for name in ("negative_step_size", "decay"):
            numbers[name] = (rates * numbers[name]).to(torch.float32)
        return numbers

    def scalars_ahead(self, group: Group, step: int) -> dict[str, Scalar]:
        numbers = super().scalars_ahead(group, step)
        assert self.courses is not None
        return numbers | {"lr_ahead": (self.courses.rates(step) * numbers["lr_ahead"]).to(torch.float32)}


class Contender:
    """One strategy under test: the optimizer itself, with the courses' learning rates in place of a number."""

    def __init__(self, courses: Courses, strategy: str, beta2: float) -> None:
        self.strategy = strategy
        self.parameter = torch.nn.Parameter(courses.start.clone())

        class Scheduled(CollageAdamW):
            rule = _ScheduledRule(decoupled=True, courses=courses)

        options: dict[str, Any] = {"lr": 1.0, "betas": (0.9, beta2), "weight_decay": WEIGHT_DECAY}
        self.optimizer = Scheduled([self.parameter], strategy=strategy, seed=1, **options)
        # It looks at a sample of the weights, which the vector of rates does not fit.
        self.optimizer._update_guard.told = True

    def step(self, gradient: Tensor) -> None:
        """Step the weights by this gradient."""
        self.parameter.grad = gradient
        self.optimizer.step()

    def bytes_per_parameter(self) -> float:
        """Weights, gradient and states, from their storages; the step counter is left out."""
        state = self.optimizer.state[self.parameter]
        kept = [self.parameter, self.parameter.grad, *(value for key, value in state.items() if key != "step")]
        storages = [tensor.untyped_storage() for tensor in kept if tensor is not None]
        return float(sum(storage.nbytes() for storage in storages) / self.parameter.numel())


def measure(courses: Courses, beta2: float, strategies: Iterable[str]) -> tuple[list[Result], dict[str, float]]:
    """Run all strategies side by side in all courses: the errors, and bytes a parameter."""
    reference = ReferenceAdamW(courses.start, lr=courses.rates(1), betas=(0.9, beta2), weight_decay=WEIGHT_DECAY)
    contenders = [Contender(courses, strategy, beta2) for strategy in strategies]
    for step, gradient in enumerate(courses.gradients(), start=1):
        reference.lr = courses.rates(step)
        reference.step(gradient)
        for contender in contenders:
            contender.step(gradient)
        if step % 1000 == 0:
            print(f"β₂ = {beta2}, step {step}", file=sys.stderr, flush=True)
    exact = (reference.parameter - courses.start.double()).view(-1, courses.elements)
    found = []
    for contender in contenders:
        moved = contender.optimizer.stored_parameter(contender.parameter) - courses.start.double()
        error = (moved.view_as(exact) - exact).norm(dim=1) / exact.norm(dim=1)
        found += [
            Result(course.name, beta2, contender.strategy, value)
            for course, value in zip(courses.courses, error.tolist(), strict=True)
        ]
    return found, {contender.strategy: contender.bytes_per_parameter() for contender in contenders}


def largest(results: list[Result], strategy: str, beta2: float, kind: str) -> float | None:
    """The largest error of a strategy among the courses of one kind; None where none was run."""
    names = {course.name for course in COURSES if KINDS[kind](course)}
    errors = [
        row.error for row in results if (row.strategy, row.beta2) == (strategy, beta2) and row.course in names
    ]
    return max(errors, default=None)


def summary(results: list[Result], sizes: dict[str, float]) -> str:
    """Markdown: the largest errors of each kind, by strategy and β₂."""
    lines = ["| strategy | bytes | β₂ | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 3) + "|"]
    for strategy in sorted(sizes, key=lambda name: -sizes[name]):
        for beta2 in dict.fromkeys(row.beta2 for row in results):
            cells = [largest(results, strategy, beta2, kind) for kind in KINDS]
            shown = " | ".join("–" if error is None else f"{error:.1e}" for error in cells)
            if any(error is not None for error in cells):
                lines.append(f"| `{strategy}` | {sizes[strategy]:.4g} | {beta2} | {shown} |")
    return "\n".join(lines)


def table(results: list[Result], beta2: float) -> str:
    """Markdown: every error at one β₂, courses down, strategies across."""
    chosen = [row for row in results if row.beta2 == beta2]
    strategies = list(dict.fromkeys(row.strategy for row in chosen))
    lines = ["| course | " + " | ".join(strategies) + " |", "|---" * (len(strategies) + 1) + "|"]
    for course in dict.fromkeys(row.course for row in chosen):
        errors = " | ".join(f"{row.error:.1e}" for row in chosen if row.course == course)
        lines.append(f"| {course} | {errors} |")
    return "\n".join(lines)


def exceeded(results: list[Result]) -> list[str]:
    """The stated errors that were not met."""
    missed = []
    for strategy, limits in STATED.items():
        for kind, limit in zip(KINDS, limits, strict=True):
            error = largest(results, strategy, 0.999, kind)
            if error is not None and error > limit:
                missed.append(f"{strategy}, {kind}: {error:.2e} > {limit:.1e}")
    return missed


def put_between_markers(page: Path, text: str) -> None:
    """Replace the text between the page's two markers."""
    content = page.read_text(encoding="utf-8")
    before, rest = content.split(START)
    _, after = rest.split(END)
    page.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="elements of each course")
    parser.add_argument("--beta2", nargs="+", type=float, default=list(BETA2))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--write", type=Path, help="a Markdown page with the two markers")
    parser.add_argument("--gate", action="store_true", help="only what is stated, and fail when it is exceeded")
    arguments = parser.parse_args()
    if arguments.gate:
        arguments.beta2, arguments.strategies = [0.999], list(STATED)
    torch.set_num_threads(1)
    results: list[Result] = []
    sizes: dict[str, float] = {}
    for beta2 in arguments.beta2:
        found, more = measure(Courses(COURSES, arguments.elements, arguments.steps), beta2, arguments.strategies)
        results += found
        sizes.update(more)
    where = f"{machine()['processor']}, torch {versions()['torch']}"
    note = f"{arguments.steps:,} steps, {arguments.elements} elements a course; {where}."
    last = max(row.beta2 for row in results)
    text = f"{summary(results, sizes)}\n\nβ₂ = {last}:\n\n{table(results, last)}\n\n{note}"
    print(text)
    if arguments.write:
        put_between_markers(arguments.write, text)
    missed = exceeded(results) if arguments.gate else []
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
