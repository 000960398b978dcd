"""What ten thousand steps of rounding leave: every strategy beside fp64 AdamW on the same gradients.

`python -m benchmarks.accumulation` prints one table for each arithmetic; `--write docs/numerics.md` puts them
between that page's markers; `--gate` ends with 1 when a stated error is exceeded.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from collage_agent.optim import LOW_COMPONENT_SUFFIX, STRATEGIES, CollageAdamW
from torch import Tensor

from benchmarks._harness import machine, versions
from tests.reference.adamw import ReferenceAdamW
from tests.reference.streams import STREAMS

ELEMENTS = 1024
BETA2 = (0.95, 0.99, 0.999)
MEASURED_EVERY = 10
STATED_ERRORS = {"plus": 1e-3, "full": 3e-4, "light-stochastic": 3e-2}
START, END = "<!-- accumulation -->", "<!-- end of accumulation -->"


@dataclass
class Result:
    """One row: relative errors in the 2-norm, and the two ratios over the second half of the steps."""

    stream: str
    beta2: float
    arithmetic: str
    strategy: str
    displacement_error: float
    second_moment_error: float
    edq_ratio: float | None
    edq_oracle_ratio: float | None


class Contender:
    """One optimizer under test, with the sums of its two ratios."""

    def __init__(self, start: Tensor, strategy: str, arithmetic: str, options: dict[str, Any]) -> None:
        self.strategy, self.arithmetic = strategy, arithmetic
        self.parameter = torch.nn.Parameter(start.clone())
        self.optimizer = CollageAdamW(
            [self.parameter],
            strategy=strategy,
            arithmetic=arithmetic,
            **options,
        )
        self.sums = {"ue": 0.0, "uu": 0.0, "oe": 0.0, "oo": 0.0}

    def joined(self, name: str) -> Tensor:
        """A moving average as it is kept, in fp64."""
        state = self.optimizer.state[self.parameter]
        value: Tensor = state[name].to(torch.float64)
        low = state.get(name + LOW_COMPONENT_SUFFIX)
        return value if low is None else value + low.to(torch.float64)

    def step(self, gradient: Tensor, oracle: Tensor | None) -> None:
        """One step, measured against the intended update and the oracle's when the oracle's is given."""
        self.parameter.grad = gradient
        if oracle is None:
            self.optimizer.step()
            return
        before = self.optimizer.stored_parameter(self.parameter)
        state = {name: self.joined(name) for name in ("exp_avg", "exp_avg_sq")}
        number = int(self.optimizer.state[self.parameter]["step"]) + 1
        group = self.optimizer.param_groups[0]
        intended, _ = self.optimizer.exact_displacement(group, state, before, gradient, number)
        self.optimizer.step()
        effective = self.optimizer.stored_parameter(self.parameter) - before
        for name, one, other in (
            ("ue", intended, effective),
            ("uu", intended, intended),
            ("oe", oracle, effective),
            ("oo", oracle, oracle),
        ):
            self.sums[name] += float((one * other).sum())

    def result(self, stream: str, beta2: float, start: Tensor, reference: ReferenceAdamW) -> Result:
        """The row of this contender after the last step."""
        exact = reference.parameter - start.double()
        moved = self.optimizer.stored_parameter(self.parameter) - start.double()
        second = self.joined("exp_avg_sq")
        sums = self.sums
        return Result(
            stream,
            beta2,
            self.arithmetic,
            self.strategy,
            float((moved - exact).norm() / exact.norm()),
            float((second - reference.second).norm() / reference.second.norm()),
            sums["ue"] / sums["uu"] if sums["uu"] else None,
            sums["oe"] / sums["oo"] if sums["oo"] else None,
        )


def measure(
    stream: str, beta2: float, arithmetics: list[str], strategies: list[str], steps: int
) -> Iterator[Result]:
    """Run all strategies side by side on one stream, with one fp64 reference."""
    source = STREAMS[stream]
    start = source.start(ELEMENTS)
    options: dict[str, Any] = {**source.options, "betas": (0.9, beta2)}
    reference = ReferenceAdamW(start, **options)
    contenders = [
        Contender(start, strategy, arithmetic, options) for arithmetic in arithmetics for strategy in strategies
    ]
    for step, gradient in enumerate(source.gradients(ELEMENTS, steps), start=1):
        oracle = reference.step(gradient)
        measured = step > steps // 2 and step % MEASURED_EVERY == 0
        for contender in contenders:
            contender.step(gradient, oracle if measured else None)
    for contender in contenders:
        yield contender.result(stream, beta2, start, reference)


def table(results: list[Result]) -> str:
    """Markdown: a table for each arithmetic and β₂, strategies down, streams across."""
    parts = []
    for arithmetic in dict.fromkeys(row.arithmetic for row in results):
        for beta2 in dict.fromkeys(row.beta2 for row in results):
            chosen = [row for row in results if row.arithmetic == arithmetic and row.beta2 == beta2]
            streams = list(dict.fromkeys(row.stream for row in chosen))
            parts.append(f"\n`{arithmetic}` arithmetic, β₂ = {beta2}\n")
            parts.append("| strategy | " + " | ".join(streams) + " |")
            parts.append("|---" * (len(streams) + 1) + "|")
            for strategy in dict.fromkeys(row.strategy for row in chosen):
                cells = [cell(row) for row in chosen if row.strategy == strategy]
                parts.append(f"| {strategy} | " + " | ".join(cells) + " |")
    return "\n".join(parts)


def cell(row: Result) -> str:
    """Displacement error, second moment's error, and the two ratios."""
    ratios = ["–" if value is None else f"{value:.3f}" for value in (row.edq_ratio, row.edq_oracle_ratio)]
    return f"{row.displacement_error:.1e}, {row.second_moment_error:.1e}, {ratios[0]}, {ratios[1]}"


def exceeded(results: list[Result]) -> list[str]:
    """The stated errors (β₂ = 0.999, noisy and falling gradients, fp32 arithmetic) that were not met."""
    return [
        f"{row.strategy}, {row.stream} gradients: {row.displacement_error:.2e} > {STATED_ERRORS[row.strategy]:.0e}"
        for row in results
        if row.strategy in STATED_ERRORS
        and row.beta2 == 0.999
        and row.arithmetic == "fp32"
        and row.stream in ("noisy", "falling")
        and row.displacement_error > STATED_ERRORS[row.strategy]
    ]


def put_between_markers(page: Path, text: str) -> None:
    """Replace what stands between the page's two markers."""
    content = page.read_text(encoding="utf-8")
    before, rest = content.split(START)
    _, after = rest.split(END)
    page.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--streams", nargs="+", default=list(STREAMS), choices=list(STREAMS))
    parser.add_argument("--beta2", nargs="+", type=float, default=list(BETA2))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--arithmetics", nargs="+", default=["fp32", "storage"], choices=["fp32", "storage"])
    parser.add_argument("--write", type=Path, help="a Markdown page with the two markers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gate", action="store_true", help="only what is stated, and fail when it is exceeded")
    arguments = parser.parse_args()
    if arguments.gate:
        arguments.streams, arguments.beta2, arguments.arithmetics = ["noisy", "falling"], [0.999], ["fp32"]
        arguments.strategies = list(STATED_ERRORS)
    torch.set_num_threads(1)
    results: list[Result] = []
    for beta2 in arguments.beta2:
        for stream in arguments.streams:
            print(f"β₂ = {beta2}, {stream} gradients, {arguments.steps} steps", file=sys.stderr, flush=True)
            results += measure(stream, beta2, arguments.arithmetics, arguments.strategies, arguments.steps)
    text = table(results)
    print(text)
    if arguments.write:
        where = f"{machine()['processor']}, torch {versions()['torch']}"
        note = f"\n{arguments.steps:,} steps of {ELEMENTS:,} elements; {where}."
        put_between_markers(arguments.write, text + "\n" + note)
    if arguments.json:
        record = {"machine": machine(), "versions": versions(), "results": [asdict(row) for row in results]}
        arguments.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    missed = exceeded(results) if arguments.gate else []
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
