"""What is said of each way to keep a weight, healthy and broken: short trainings, judged by the code.

`python -m tests.keepers.table` prints the table of docs/optimizers.md.
"""

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from collage_agent.handle import watch
from torch import nn

from tests.keepers.ways import BF16, FP16, FP32, RATES, STUCK, Way, ways

STEPS = 24
BEFORE = 8
CONDITIONS = ("healthy", "dropped", "sign", "frozen", "stuck")


@dataclass(frozen=True, eq=False)
class Case:
    """A training: a way, what is broken of it, and the dtype of the model's weights."""

    way: Way
    condition: str
    dtype: torch.dtype

    @property
    def healthy(self) -> bool:
        """What is true of it."""
        return self.condition == "healthy" and not self.way.loses and self.dtype not in self.way.off

    @property
    def name(self) -> str:
        return f"{self.way.who}: {self.way.name}, {self.condition}, {str(self.dtype).removeprefix('torch.')}"


def cases() -> Iterator[Case]:
    """Every way under every condition that can break it."""
    for way in ways():
        for dtype in way.dtypes:
            conditions = ["healthy", *way.faults]
            conditions += ["dropped"] * (way.completes is not None)
            conditions += ["stuck"] * (dtype in way.stuck and way.weights is None)
            yield from (Case(way, condition, dtype) for condition in CONDITIONS if condition in conditions)


def judged(case: Case) -> Any:
    """The judgement of the case's training."""
    way, condition, dtype = case.way, case.condition, case.dtype
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(30, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 5))
    model = model.to(way.weights or dtype)
    visible = copy.deepcopy(model).to(dtype) if way.masters else model
    betas = (0.9, STUCK.get(dtype, 0.999) if condition == "stuck" else 0.95)
    rate = RATES.get(dtype, 1e-4)
    more = {"fault": condition} if condition in way.faults else {}
    optimizer = way.make(model.parameters(), rate, None if "Lion" in way.name else betas, **more)
    if condition == "dropped":
        steps(way, model, visible, optimizer, 0, BEFORE)
        for state in optimizer.state.values():
            state[way.completes].zero_()
    if condition == "stuck":
        # Late in training, where no correction for the beginning hides what the average does.
        steps(way, model, visible, optimizer, 0, 2)
        late(optimizer)
    handle = watch(model, optimizer, every=1, sample="all", oracle=True, windows=(8,), budget=None)
    steps(way, model, visible, optimizer, BEFORE, STEPS)
    return handle.judgement()


def late(optimizer: Any) -> None:
    """Set every step counter to a late step."""
    for holder in (*optimizer.param_groups, *optimizer.state.values()):
        if isinstance(holder.get("step"), torch.Tensor):
            holder["step"].fill_(10**6)
        elif "step" in holder:
            holder["step"] = 10**6


def steps(way: Way, model: Any, visible: Any, optimizer: Any, start: int, end: int) -> None:
    """Train from step `start` to `end`."""
    for step in range(start, end):
        generator = torch.Generator().manual_seed(2000 + step)
        inputs = torch.randn(16, 30, generator=generator).to(next(visible.parameters()).dtype)
        # Gradients large enough that fp16 holds their squares, now smaller, now larger.
        loss = (visible(inputs).float() - 1.0).square().mean() * (60.0 if step % 2 else 30.0)
        loss.backward()
        for parameter, seen in zip(model.parameters(), visible.parameters(), strict=True):
            if way.masters:
                parameter.grad = seen.grad.float()
            if way.decoupled:
                parameter.decoupled_grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for parameter, seen in zip(model.parameters(), visible.parameters(), strict=True):
            parameter.grad = seen.grad = None
            if way.masters:
                seen.data.copy_(parameter.data)


def verdict_of(case: Case, health: str) -> str:
    """ "right", "unknown" or "false": "healthy" is right of what is healthy, any sick word of what is sick."""
    if health == "unknown":
        return "unknown"
    return "right" if (health == "healthy") == case.healthy else "false"


NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
HEADINGS = {
    "healthy": "as it is",
    "dropped": "dropped at a resume",
    "sign": "sign wrong",
    "frozen": "low part frozen",
    "stuck": "β₂ too large for its dtype",
}


def rows(words: Mapping[Case, str]) -> list[str]:
    """The table's lines, a way each; a cell has the words by dtype."""
    lines = [f"| kept by | how | dtypes | {' | '.join(HEADINGS.values())} |", "|---" * (3 + len(HEADINGS)) + "|"]
    by_way: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for case, word in words.items():
        cells = by_way.setdefault((case.way.who, case.way.name), {})
        cells.setdefault(case.condition, {})[NAMES[case.dtype]] = word
    for (who, name), cells in by_way.items():
        dtypes = ", ".join(dict.fromkeys(dtype for cell in cells.values() for dtype in cell))
        told = " | ".join(_cell(cells.get(condition, {})) for condition in HEADINGS)
        lines.append(f"| {who} | {name} | {dtypes} | {told} |")
    return lines


def _cell(words: Mapping[str, str]) -> str:
    if len(set(words.values())) > 1:
        return "; ".join(f"{dtype} {word}" for dtype, word in words.items())
    return next(iter(words.values()), "—")


def all_words() -> dict[Case, str]:
    """The word of every case."""
    with torch.compiler.set_stance("force_eager"):
        return {case: str(judged(case).health) for case in cases()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write("\n".join(rows(all_words())) + "\n")
