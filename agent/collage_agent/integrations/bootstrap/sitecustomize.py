"""Runs first in every Python process under `collage-monitor run`; waits for torch, then for an optimizer's step.

It imports nothing but the standard library, so that a program without torch pays nothing, and it never raises.
The site's own sitecustomize, which this one hides, is run as well.

`collage_monitor/environment.py` names this folder as a string: move both.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Any, Final

_FOLDER: Final = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(MetaPathFinder):
    """Lets the others find torch, and hooks its optimizers once it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookingLoader(spec.loader)
        return spec


class _HookingLoader(Loader):
    """torch's loader, followed by our hook."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            hook_optimizers()
            atexit.register(_at_exit)
        except Exception as error:
            _say(f"this torch offers no hooks for optimizers ({error})")


def hook_optimizers() -> None:
    """Have every optimizer announce its steps, and every parameter that hooks on its gradient may step it."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_before_step)
    own: Any = torch.Tensor.register_post_accumulate_grad_hook

    @functools.wraps(own)
    def register_post_accumulate_grad_hook(self: Any, hook: Any) -> Any:
        handle = own(self, hook)
        if (agent := _agent()) is not None and not torch.compiler.is_compiling():
            agent.gradient_is_hooked(self, hook)
        return handle

    torch.Tensor.register_post_accumulate_grad_hook = register_post_accumulate_grad_hook  # type: ignore[method-assign]


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if (agent := _agent()) is not None:
        agent.step_begins(optimizer)


def _agent() -> Any:
    """The agent's side, imported when it is first needed; None where it is not installed."""
    global _agent_of
    if _agent_of is None:
        import random

        # Modules that are imported here draw random numbers at import, which are the training's.
        drawn = random.getstate()
        try:
            from collage_agent.integrations import attach

            _agent_of = attach
        except Exception as error:
            _say(f"collage_agent cannot be imported by {sys.executable} ({error}); install it there")
            _agent_of = False
        random.setstate(drawn)
    return _agent_of or None


def _at_exit() -> None:
    """Say that no step was seen though an optimizer was made: torch marks the step of its class."""
    if _agent_of.has_seen_steps() if _agent_of else _agent_of is False or "collage_agent" in sys.modules:
        return
    kinds = [sys.modules["torch"].optim.Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    made = [kind.__name__ for kind in kinds if hasattr(kind.__dict__.get("step"), "hooked")]
    if made:
        _say(
            f"step() of {made[0]} was never called: if hooks step its parameters in the backward pass, call "
            "collage_agent.watch(model, optimizer) before the first one"
        )


_agent_of: Any = None
"""`collage_agent.integrations.attach`; None until it is needed, False where it cannot be imported."""


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None:
        sys.stderr.write(f"collage: {text}; the training runs unwatched\n")


def _run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that would have run without this one, if there is any."""
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _FOLDER]
    sys.path[:] = elsewhere
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("COLLAGE_ATTACH") == "1":
    sys.meta_path.insert(0, _AfterTorch())
_run_hidden_sitecustomize()
