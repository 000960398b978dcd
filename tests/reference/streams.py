"""Streams of gradients on which optimizers are compared with fp64, the same for equal arguments."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


def start_of(elements: int) -> torch.Tensor:
    """Weights of the size that small models begin with."""
    return (torch.randn(elements, generator=torch.Generator().manual_seed(2)) * 0.02).bfloat16()


def noisy_gradients(elements: int, steps: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[torch.Tensor]:
    """Gradients with noise three times as large as their mean, both of the size that small models see."""
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(elements, generator=generator) * 3e-4
    for _ in range(steps):
        yield (mean + torch.randn(elements, generator=generator) * 1e-3).to(dtype)


def falling_gradients(elements: int, steps: int) -> Iterator[torch.Tensor]:
    """Noisy gradients that fall by a factor of thirty over the steps."""
    for index, gradient in enumerate(noisy_gradients(elements, steps, torch.float32)):
        yield (gradient * 30 ** (-index / steps)).bfloat16()


WEIGHTS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "0.02": lambda elements, generator: torch.randn(elements, generator=generator) * 0.02,
    "0.5": lambda elements, generator: torch.randn(elements, generator=generator) * 0.5,
    "1": lambda elements, generator: 1 + 0.1 * torch.randn(elements, generator=generator),
    "four decades": lambda elements, generator: (
        10 ** (-4 * torch.rand(elements, generator=generator)) * torch.randn(elements, generator=generator).sign()
    ),
}
"""Normal around zero with that spread, around one, and from 1e-4 to 1 evenly by magnitude."""


@dataclass(frozen=True)
class Course:
    """One training's gradients, the weights that it starts from, and its learning rate.

    kind: "constant"; "noisy", noise three times the mean; "zero-mean", noise alone; "falling", noisy, by a factor
    of thirty; "heavy-tailed", Student's t with two degrees around a mean; "sparse", noisy, one in fifty not zero.
    """

    kind: str
    weights: str
    rate: float = 3e-4
    cosine: bool = False

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.kind}, weights {self.weights}, {self.rate:g}{' to zero' if self.cosine else ''}"


COURSES = (
    *(
        Course(kind, weights, cosine=cosine)
        for cosine in (False, True)
        for kind in ("noisy", "zero-mean", "falling")
        for weights in WEIGHTS
    ),
    *(Course("noisy", weights, 1e-5) for weights in ("0.5", "1", "four decades")),
    Course("zero-mean", "1", 1e-5),
    Course("noisy", "1", 1e-5, cosine=True),
    *(Course("noisy", weights, 2e-5) for weights in ("1", "four decades")),
    Course("falling", "1", 2e-5),
    *(Course(kind, weights) for kind in ("heavy-tailed", "sparse") for weights in ("0.02", "1")),
    Course("constant", "0.02", 1e-4),
)


class Courses:
    """Several courses side by side, as one vector of `elements` for each: gradients are bfloat16."""

    def __init__(self, courses: tuple[Course, ...], elements: int, steps: int, seed: int = 3) -> None:
        self.courses, self.elements, self.steps = courses, elements, steps
        self._generator = torch.Generator().manual_seed(seed)
        self.start = torch.cat(
            [WEIGHTS[course.weights](elements, self._generator) for course in courses]
        ).bfloat16()
        spread = {"zero-mean": 0.0, "constant": 1e-3}
        self._mean = self._each(lambda course: spread.get(course.kind, 3e-4))
        self._mean *= torch.randn(len(self._mean), generator=self._generator)
        self._noise = self._each(lambda course: 0.0 if course.kind == "constant" else 1e-3)
        self._falling = self._each(lambda course: course.kind == "falling").bool()
        self._rate = self._each(lambda course: course.rate)
        self._cosine = self._each(lambda course: course.cosine).bool()

    def _each(self, value: Callable[[Course], float]) -> torch.Tensor:
        return torch.tensor([float(value(course)) for course in self.courses]).repeat_interleave(self.elements)

    def rates(self, step: int) -> torch.Tensor:
        """Every element's learning rate in step `step`, from 1: fp64."""
        rate = self._rate.double()
        return torch.where(self._cosine, rate * (0.5 + 0.5 * math.cos(math.pi * step / self.steps)), rate)

    def gradients(self) -> Iterator[torch.Tensor]:
        """One gradient a step."""
        for step in range(self.steps):
            noise = torch.randn(len(self._mean), generator=self._generator)
            for number, course in enumerate(self.courses):
                own = slice(number * self.elements, (number + 1) * self.elements)
                if course.kind == "heavy-tailed":
                    squares = torch.randn(2, self.elements, generator=self._generator).square().mean(0)
                    noise[own] /= squares.sqrt()
            gradient = self._mean + noise * self._noise
            gradient = torch.where(self._falling, gradient * 30 ** (-step / self.steps), gradient)
            for number, course in enumerate(self.courses):
                if course.kind == "sparse":
                    own = slice(number * self.elements, (number + 1) * self.elements)
                    gradient[own] *= torch.rand(self.elements, generator=self._generator) < 0.02
            yield gradient.bfloat16()
