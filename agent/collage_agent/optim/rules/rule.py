"""What an update rule is: the displacement of one step, in operations that an arithmetic carries out.

A rule runs unchanged in fp32 on chunks, in the storage format operation by operation, in fp64 as the exact rule
that the agent's shadow step calls, and inside a compiled step: the arithmetic decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from collage_agent.optim.arithmetic import Arithmetic, Scalar, State

__all__ = ["Group", "Moment", "Rule"]

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Moment:
    """A moving average that a rule keeps: its state key, whether it averages squares, and its decay factor."""

    name: str
    second: bool = False
    decay: float | None = field(default=None, compare=False)


class Rule(Protocol):
    """What an optimizer needs to know of its rule.

    moves_by_learning_rate: whether an element's step is about as large as the learning rate, whatever the
    gradient.
    """

    @property
    def moves_by_learning_rate(self) -> bool: ...

    def moments(self, group: Group) -> tuple[Moment, ...]:
        """The moving averages that the rule keeps under these options."""

    def scalars(self, group: Group, step: int) -> dict[str, Scalar]:
        """The numbers that enter step `step` (1 for the first), computed in double precision.

        A term that is switched off has no entry, so that its operations are left out, not multiplied by zero.
        """

    def displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> Tensor:
        """The step's displacement, weight decay included; a fresh tensor.

        parameter, gradient: one shape, left unchanged. state: the moving averages by name, advanced in place.
        """

    def torch_step(self, group: Group, parameter: Tensor, gradient: Tensor, state: State) -> bool:
        """Let torch's own for-loop optimizer make the step, `step` counter included; False where torch has none."""
