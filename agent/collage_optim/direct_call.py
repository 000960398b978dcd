"""A step's compiled code called directly, past the checks of torch's compiler.

At each call they look at all that the code could depend on. After a kernel has swept the caches, this takes a tenth
of a millisecond and more: at 10 million parameters in 76 tensors, a sixth of the step. Ours depends on the formats
of the vectors, of which only the gradient's may be another one, and on there being more than one element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collage_optim.advance import Run
from collage_optim.arithmetic import State

__all__ = ["DirectCall"]

_Code = Callable[..., object]


class DirectCall:
    """`step(components, packed, numbers)` compiled on a CPU for vectors of any one length.

    Calls of a single element go through the compiler, and the first one for each format of the gradient. It shows
    which of our tensors is which input of the compiled code; where that is not plain, all calls go through the
    compiler.
    """

    def __init__(self, step: Callable[..., None], options: dict[str, Any]) -> None:
        self._options = options
        self._checked = torch.compile(step, dynamic=True, fullgraph=True, backend=self._compiled)
        self._called: tuple[_Code, Sequence[object]] | None = None
        self._direct: dict[torch.dtype, tuple[_Code, list[str]]] = {}

    def __call__(self, components: State, packed: Tensor, numbers: Tensor | None) -> Run:
        """The step of these components, which is made when the result is called."""
        gradient = components["gradient"]
        sizes = {f"size {dim}": size for dim, size in enumerate(gradient.shape)}
        given = {**components, "packed": packed, "numbers": numbers, **sizes}
        direct = self._direct.get(gradient.dtype) if gradient.shape[0] > 1 else None
        if direct is None:
            return partial(self._first, components, packed, numbers, given)
        code, names = direct
        return partial(code, *[given[name] for name in names])

    def _first(self, components: State, packed: Tensor, numbers: Tensor | None, given: dict[str, Any]) -> None:
        self._checked(components, packed, numbers)
        called, self._called = self._called, None
        if called is not None and given["gradient"].shape[0] > 1:
            code, inputs = called
            names = [_name(value, given) for value in inputs]
            if all(names):
                self._direct[given["gradient"].dtype] = code, names

    def _compiled(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> _Code:
        from torch._inductor import compile

        code = compile(graph, inputs, self._options)

        def noted(*inputs: object) -> object:
            self._called = code, inputs
            return code(*inputs)

        return noted


def _name(value: object, given: dict[str, Any]) -> str:
    """What an input is called; "" where that is not plain."""
    if isinstance(value, int):
        found = [name for name, own in given.items() if isinstance(own, int) and own == value]
    else:
        found = [name for name, own in given.items() if own is value]
    return found[0] if len(found) == 1 else ""
