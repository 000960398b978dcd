"""`collage-monitor run`: watches every optimizer of a program from its first step, without a change of its code.

The command sets variables (`collage_monitor.environment`). By them a bootstrap folder in front of PYTHONPATH makes
each Python process call `step_begins` from torch's process-wide hook, and `gradient_is_hooked` for parameters that
hooks on their gradients may step, without a call of step(). The run is named after the script, or after
the role that `name_by_role` finds; the other variables decide the rest.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from collage_agent import session
from collage_agent.error_guard import Guard
from collage_agent.intent.foreign_optimizers import inner_optimizers
from collage_agent.training.deepspeed import is_stepped_by
from collage_agent.training.watched_parameters import all_optimizers
from collage_agent.watching.hooks import is_watched
from collage_agent.watching.iterations import BackwardSteps
from collage_monitor.wire import Door

__all__ = ["find_model", "name_by_role", "step_begins"]

RoleOf = Callable[[FrameType], str]
_MOST_WATCHES: Final = 8
_DOORS: Final[dict[str, Door]] = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "transformers": "transformers",
}
_LOG = logging.getLogger("collage_agent")


class _AutomaticWatches:
    """The watches that this process has attached by itself."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.watches = 0
        self.role_of: RoleOf | None = None
        self.roles: dict[str, None] = {}
        self.passes: dict[int, BackwardSteps] = {}
        self.has_seen_steps = False

    def attach(self, optimizer: Optimizer) -> None:
        """Watch an optimizer unless somebody does already, or it only calls others."""
        if is_watched(optimizer) or any(inner_optimizers(optimizer)):
            return
        if self.watches == _MOST_WATCHES:
            _LOG.warning("%d optimizers are watched; further ones are left alone", _MOST_WATCHES)
        self.watches += 1
        if self.watches > _MOST_WATCHES:
            return
        role = None if self.role_of is None else self.role_of(sys._getframe())
        if session.current_run() is None:
            session.init(name=_run_name(role))
        model = find_model(optimizer)
        if role is not None:
            self.roles.setdefault(role)
            if role != next(iter(self.roles)):
                # A second role in this process: prefix its layers, so that they differ from the first role's.
                model = nn.ModuleDict({role: model})
        alike = _one_each(model, optimizer)
        self.seen.update(alike)
        session.watch(model, alike).came_through(_door())

    def look_for_steps_of(self, parameter: Tensor) -> None:
        """Attach after the first backward pass in which hooks step the parameter, if an optimizer holds it."""
        stepped = partial(self._was_stepped, parameter)
        passes = BackwardSteps([parameter], dict, lambda: None, stepped, self.guard.caught)
        self.passes[id(parameter)] = passes
        passes.look()

    def _was_stepped(self, parameter: Tensor) -> None:
        if id(parameter) not in self.passes:
            return
        self.passes.pop(id(parameter)).stop()
        for optimizer in all_optimizers():
            if any(own is parameter for group in optimizer.param_groups for own in group["params"]):
                step_begins(optimizer)

    def steps_are_known(self, optimizer: Optimizer) -> None:
        """Look no more for steps of its parameters."""
        for group in optimizer.param_groups if self.passes else ():
            for parameter in group["params"]:
                if (passes := self.passes.pop(id(parameter), None)) is not None:
                    passes.stop()


_AUTOMATIC = _AutomaticWatches()


def step_begins(optimizer: Optimizer) -> None:
    """Called before every step of every optimizer; attaches at the first one, and never raises."""
    if optimizer in _AUTOMATIC.seen:
        return
    _AUTOMATIC.seen.add(optimizer)
    _AUTOMATIC.has_seen_steps = True
    try:
        _AUTOMATIC.steps_are_known(optimizer)
        _AUTOMATIC.attach(optimizer)
    except Exception as error:
        _AUTOMATIC.guard.caught(f"watching {type(optimizer).__name__}", error)


def gradient_is_hooked(parameter: Tensor, hook: object) -> None:
    """Called after a hook was put on a parameter's gradient: it may step the parameter. Never raises."""
    if isinstance(getattr(hook, "__self__", None), BackwardSteps):
        # Ours, or that of a watch which the program has attached by itself.
        _AUTOMATIC.has_seen_steps |= id(parameter) not in _AUTOMATIC.passes
    elif id(parameter) not in _AUTOMATIC.passes and not _AUTOMATIC.has_seen_steps:
        try:
            _AUTOMATIC.look_for_steps_of(parameter)
        except Exception as error:
            _AUTOMATIC.guard.caught("looking at a parameter with hooks", error)


def has_seen_steps() -> bool:
    """Whether any optimizer's steps are known, by this module or by a watch of the program's own."""
    return _AUTOMATIC.has_seen_steps


def name_by_role(role_of: RoleOf) -> None:
    """Name runs by their role, which role_of finds from the frame of the hook in which a first step begins."""
    _AUTOMATIC.role_of = role_of


def _door() -> Door:
    """The framework whose loop takes the step, from the stack frames: the outermost that is one."""
    found: Door = "torch"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = _DOORS.get(str(frame.f_globals.get("__name__", "")).partition(".")[0], found)
        frame = frame.f_back
    return found


def _one_each(model: nn.Module, optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers of this class that step one parameter of the model each, if this is such a one."""
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}

    def place_of(other: Optimizer) -> int | None:
        held = [parameter for group in other.param_groups for parameter in group["params"]]
        return places.get(id(held[0])) if len(held) == 1 else None

    if place_of(optimizer) is None:
        return [optimizer]
    same = [other for other in all_optimizers() if type(other) is type(optimizer) and not is_watched(other)]
    found = {place: other for other in same if (place := place_of(other)) is not None}
    found[place_of(optimizer) or 0] = optimizer
    return [found[place] for place in sorted(found)]


def find_model(optimizer: Optimizer) -> nn.Module:
    """The outermost module alive that holds most of the optimizer's parameters.

    Without one, a module made of the names in the parameter groups; if they have no names either, an empty module,
    so that parameters are named by group and position. Walks all objects of the process, once.
    """
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules = [module for module in gc.get_objects() if _is_module(module)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    best, most = None, 0
    for module in modules:
        if id(module) not in inner:
            held = sum(
                id(parameter) in parameters
                or id(getattr(parameter, "main_param", None)) in parameters
                or is_stepped_by(optimizer, parameter)
                for parameter in module.parameters()
            )
            if held > most:
                best, most = module, held
    return best if best is not None else _module_of_names(optimizer)


def _module_of_names(optimizer: Optimizer) -> nn.Module:
    root = nn.Module()
    for name, parameter in _names(optimizer):
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, parameter)
    return root


def _names(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    group: dict[str, Any]
    for group in optimizer.param_groups:
        for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False):
            if isinstance(parameter, nn.Parameter):
                yield name, parameter


def _is_module(value: object) -> bool:
    # type() and not __class__: a proxy claims its target's class, and may load the target to answer.
    return issubclass(type(value), nn.Module) and "_modules" in value.__dict__


def _run_name(role: str | None) -> str | None:
    given = os.environ.get("COLLAGE_RUN_NAME")
    if role is not None:
        return f"{given}-{role}" if given else role
    return None if given else _script_name()


def _script_name() -> str | None:
    name = Path(sys.argv[0]).stem if sys.argv else ""
    return name if name not in ("", "-c", "-m") else None
