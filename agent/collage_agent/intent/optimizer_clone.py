"""A second instance of the user's optimizer that steps other tensors and leaves no trace in the first.

Whatever steps a clone does it through here: the self-test, the shadow, probes and the measurer. The user's
optimizer, its random numbers and its output stay as they were; that is fixed (`tests/agent/test_bit_identity.py`).
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

__all__ = [
    "clone_entries",
    "clone_group",
    "clone_optimizer",
    "clone_settings",
    "clone_value",
    "holds_values",
    "isolated",
    "uncompiled",
    "undecorated_step",
    "without_output",
    "without_output_or_warnings",
]

_OF_OTHERS: Final = frozenset(("torch", *sys.stdlib_module_names))
_PLAIN_VALUES: Final = frozenset((bool, int, float, str, type(None)))
_LOSS_SCALING: Final = ("grad_scale", "found_inf")
_NOT_COPIED: Final = ("state", "param_groups", *_LOSS_SCALING)
_FUSED_ON_CPU: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def clone_value(value: Any, *, objects: bool = True, copies: dict[int, Any] | None = None) -> Any:
    """A copy that shares no tensor, no container and, with `objects`, no `holds_values` with `value`.

    copies: of tensors and objects, by their id, which take the place of those; new ones are added.
    """
    return _clone(value, copies if copies is not None else {} if objects else None)


def clone_entries(entries: Mapping[str, Any], *left_out: str) -> dict[str, Any]:
    """Copies of all values but those under the keys that are left out."""
    return {
        key: value if type(value) in _PLAIN_VALUES else clone_value(value)
        for key, value in entries.items()
        if key not in left_out
    }


def _clone(value: Any, copies: dict[int, Any] | None) -> Any:
    """`copies`: objects that were met, by id, since they may refer to each other; None: objects are shared."""
    if type(value) in _PLAIN_VALUES:
        return value
    if isinstance(value, Tensor):
        known = None if copies is None else copies.get(id(value))
        return value.detach().clone() if known is None else known
    if isinstance(value, torch.Generator):
        own = torch.Generator(value.device)
        own.set_state(value.get_state())
        return own
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, _entries(value, copies))
    if type(value) in (dict, OrderedDict):
        return type(value)(_entries(value, copies))
    if isinstance(value, deque):
        return deque((_clone(entry, copies) for entry in value), value.maxlen)
    if type(value) in (list, tuple, set):
        return type(value)([_clone(entry, copies) for entry in value])
    if copies is None or not holds_values(value):
        return value
    if id(value) not in copies:
        copied = copies[id(value)] = object.__new__(type(value))
        copied.__dict__.update({name: _clone(entry, copies) for name, entry in vars(value).items()})
    return copies[id(value)]


def _entries(value: Mapping[Any, Any], copies: dict[int, Any] | None) -> Iterator[tuple[Any, Any]]:
    for key, entry in value.items():
        yield key if copies is None else copies.get(id(key), key), _clone(entry, copies)


def holds_values(value: Any) -> bool:
    """Whether this is an object of Python's that keeps run state, such as GaLore's projection: a step writes to it.

    Modules, optimizers, functions, enumerations, and what torch or Python itself makes, are none.
    """
    return (
        hasattr(value, "__dict__")
        and type(value).__module__.partition(".")[0] not in _OF_OTHERS
        and not callable(value)
        and not isinstance(value, torch.nn.Module | Optimizer | Enum)
    )


def clone_settings(group: Mapping[str, Any], copies: dict[int, Any] | None = None) -> dict[str, Any]:
    """A group's hyper-parameters and run state without its parameters; tensors are copied. `copies`: see
    `clone_value`.

    torch's Adafactor takes an eps of None from the dtype of the group's first weight: that one is written down, for
    a clone steps fp64.
    """
    cloned = {
        key: value if type(value) in _PLAIN_VALUES else clone_value(value, copies=copies)
        for key, value in group.items()
        if key != "params"
    }
    eps, weights = cloned.get("eps"), group.get("params")
    if weights and isinstance(eps, tuple) and None in eps:
        own = torch.finfo(weights[0].dtype).eps
        cloned["eps"] = tuple(own if value is None else value for value in eps)
    return cloned


def clone_group(group: dict[str, Any], kind: type[Optimizer], device: torch.device) -> dict[str, Any]:
    """The settings of a group, for a clone that steps on `device`.

    Torch's own optimizers take their fused kernel on the CPU, which is the fastest on one flat tensor; options
    that need an accelerator are cleared there.
    """
    cloned = clone_settings(group)
    if device.type == "cpu":
        if cloned.get("capturable"):
            cloned["capturable"] = False
        if "fused" in cloned and kind in _FUSED_ON_CPU and not cloned.get("differentiable"):
            cloned["fused"], cloned["foreach"] = True, False
        if isinstance(cloned.get("lr"), Tensor):
            # Arithmetic among fp32 scalars would round the step size.
            cloned["lr"] = cloned["lr"].to(torch.float64)
    cloned["params"] = []
    return cloned


def clone_optimizer(optimizer: Optimizer, copies: dict[int, Any] | None = None) -> Optimizer:
    """An instance of the same class with copied attributes, no parameters, no state and no hooks.

    Without `copies` (see `clone_value`), attributes share their objects that hold values.

    Neither the constructor nor `__getstate__` is called: the first may want arguments or recurse through global
    hooks, the second drops settings kept on the instance. Callables patched over methods (a scheduler's `step`)
    are dropped: they are bound to the live optimizer.
    """
    kind = type(optimizer)
    clone: Optimizer = object.__new__(kind)
    for name, value in vars(optimizer).items():
        if name in _NOT_COPIED or (callable(value) and hasattr(kind, name)):
            continue
        clone.__dict__[name] = (
            OrderedDict() if name.endswith("_hooks") else clone_value(value, objects=False, copies=copies)
        )
    clone.state = defaultdict(dict)
    clone.param_groups = []
    return clone


def undecorated_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """The class's `step` below torch's hook wrapper: calling it fires no hook and no profiler range."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


@contextmanager
def uncompiled(kind: type) -> Iterator[None]:
    """Functions that `kind`'s step compiles run uncompiled, because a compiled step hides its casts and has no fp64
    kernel.

    torch's own optimizers compile nothing; they are spared the 20 µs.
    """
    if kind.__module__.startswith("torch.optim"):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Nothing outside notices what runs inside: no process-wide optimizer hook fires, random states are restored.

    Does not synchronise: the states of random generators live on the host. The hooks' tables are exchanged and not
    emptied, because one of their hooks may be running.
    """
    before, after = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    host_state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    torch_optimizer._global_optimizer_pre_hooks = OrderedDict()
    torch_optimizer._global_optimizer_post_hooks = OrderedDict()
    try:
        with torch.no_grad():
            yield
    finally:
        torch_optimizer._global_optimizer_pre_hooks = before
        torch_optimizer._global_optimizer_post_hooks = after
        torch.set_rng_state(host_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)


class _OtherThreadsStream:
    """A stream that keeps one thread's words in `heard` and passes on what others write."""

    def __init__(self, stream: Any, thread: int, heard: list[str]) -> None:
        self._stream = stream
        self._thread = thread
        self._heard = heard

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            return self._stream.write(text)  # type: ignore[no-any-return]
        self._heard.append(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def without_output_or_warnings() -> Iterator[list[str]]:
    """As `without_output`, and warnings, which Python does not tell apart by thread, are ignored."""
    with warnings.catch_warnings(), without_output() as heard:
        warnings.simplefilter("ignore")
        yield heard


@contextmanager
def without_output() -> Iterator[list[str]]:
    """Prints and logs of this thread are suppressed inside, because a clone does not train. Yields the previous
    state.

    Other threads print and log as before. Warnings are left alone: to catch them makes Python forget which it has
    shown, and those of the training would come again.
    """
    thread, heard = threading.get_ident(), list[str]()
    streams = sys.stdout, sys.stderr
    handle = logging.Logger.handle

    def handle_of_others(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != thread:
            handle(logger, record)
        else:
            heard.append(record.getMessage())

    sys.stdout, sys.stderr = (stream and _OtherThreadsStream(stream, thread, heard) for stream in streams)
    logging.Logger.handle = handle_of_others  # type: ignore[method-assign, assignment]
    try:
        yield heard
    finally:
        logging.Logger.handle = handle  # type: ignore[method-assign]
        sys.stdout, sys.stderr = streams
