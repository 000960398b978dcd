"""Averages of the weights are found by the calls that update them: such a call names the average and its model.

`session.py` has one for its process. It changes no argument and no result of the calls it sees.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from collage_agent.error_guard import reraise_in_tests
from collage_agent.watching.average_watch import EVERY, SAMPLE, AverageWatch, ModelWatch

__all__ = ["AverageFinder"]

_LOG = logging.getLogger("collage_agent")
_FOUND: Final = (
    ("torch.optim.swa_utils", "AveragedModel", "update_parameters"),
    ("diffusers.training_utils", "EMAModel", "step"),
    ("timm.utils.model_ema", "ModelEmaV3", "update"),
    ("timm.utils.model_ema", "ModelEmaV2", "update"),
    ("timm.utils.model_ema", "ModelEma", "update"),
)
"""Modules and classes whose averages are found, and what updates them; who uses one has imported it."""


class AverageFinder:
    """The averages that are watched in this process, and the calls of known classes that update them.

    While a model is watched, these classes' averaging methods are wrapped. A call names the average and its model,
    so averages are found by their use, and never assigned to the wrong model.
    """

    def __init__(self, seed: Callable[[], int]) -> None:
        """seed: what fixes the samples."""
        self._seed = seed
        self._handles: weakref.WeakKeyDictionary[Any, AverageWatch | None] = weakref.WeakKeyDictionary()
        self._loose: list[weakref.ref[AverageWatch]] = []
        self._watches: list[weakref.ref[Any]] = []
        self._wrapped: dict[tuple[type, str], Any] = {}

    def watch_began(self, watch: ModelWatch) -> None:
        """Let a newly watched model report its averages, also those that are found later."""
        self._watches = [ref for ref in (*self._watches, weakref.ref(watch)) if self._alive(ref) is not None]
        for average in [average for average, handle in self._handles.items() if handle is None]:
            del self._handles[average]
        for module, name, method in _FOUND:
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type):
                self._wrap(kind, method)
        for handle in (ref() for ref in self._loose):
            if handle is not None and not handle.removed and handle.parameters & watch.parameters:
                handle.report_with(watch)

    def watch(
        self,
        average: object,
        model: nn.Module,
        decay: float | None = None,
        *,
        every: int | None = None,
        sample: int | Literal["all"] | None = None,
        given: Sequence[Tensor] = (),
        found: bool = False,
    ) -> AverageWatch:
        """Watch an average; see `collage_agent.watch_average`.

        given: the weights that it averages, in its order. found: not by the user.
        """
        watch = self.watch_of(frozenset(map(id, model.parameters())))
        thins = every is None and (watch is None or watch.options.budget is not None)
        if every is None:
            every = EVERY if watch is None else watch.options.every
        if sample is None:
            sample = SAMPLE if watch is None or watch.options.sample != "all" else "all"
        handle = AverageWatch(average, model, decay, every, sample, self._seed(), given, thins=thins, found=found)
        self._add(average, handle)
        return handle

    def _add(self, average: object, handle: AverageWatch) -> None:
        """Its handle is notified of updating calls, and its model's watch reports it."""
        if handle.method is not None:
            if (known := self._handles.get(average)) is not None:
                known.remove()
            self._handles[average] = handle
            self._wrap(type(average), handle.method)
        self._loose = [ref for ref in (*self._loose, weakref.ref(handle)) if ref() is not None]
        watch = self.watch_of(handle.parameters)
        if watch is not None:
            handle.report_with(watch)

    def watch_of(self, parameters: frozenset[int]) -> Any:
        """The newest watch of some of these parameters; None: they are not watched."""
        found = (self._alive(ref) for ref in reversed(self._watches))
        return next((watch for watch in found if watch is not None and watch.parameters & parameters), None)

    def _alive(self, ref: weakref.ref[Any]) -> Any:
        watch = ref()
        return None if watch is None or watch.removed else watch

    def _wrap(self, kind: type, method: str) -> None:
        owner = next((base for base in kind.__mro__ if method in vars(base)), None)
        if owner is None or (owner, method) in self._wrapped:
            return
        original = vars(owner)[method]

        @functools.wraps(original)
        def told(average: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(average, *args, **kwargs)
            args, returned = self._called(average, args, kwargs)
            finished = False
            try:
                result = original(average, *args, **kwargs)
                finished = True
            finally:
                if returned is not None:
                    returned(finished)
            return result

        self._wrapped[owner, method] = original
        setattr(owner, method, told)

    def _called(
        self, average: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Callable[[bool], None] | None]:
        """The call's arguments, with iterators turned into lists, and the function to call after it returns."""
        if not any(self._alive(ref) for ref in self._watches) and not any(self._going_on()):
            self.unwrap()
            return args, None
        try:
            known = self._handles.get(average)
            if average not in self._handles or (known is not None and known.may_return):
                if args and isinstance(args[0], Iterator):
                    args = (list(args[0]), *args[1:])
                self._find(average, args[0] if args else next(iter(kwargs.values()), None))
            handle = self._handles.get(average)
            return args, None if handle is None else handle.called(average, args, kwargs)
        except Exception as error:
            reraise_in_tests(error)
            _LOG.info("an average of the weights is not looked for: %s", error)
            return args, None

    def _find(self, average: Any, source: object) -> None:
        """An average is updated for the first time, from `source`: watch it, if that is a watched model."""
        # Never read the call's argument here: that would use up an iterator.
        given: Sequence[Tensor] = ()
        if isinstance(source, nn.Module):
            given = [*source.parameters()]
        elif isinstance(source, list | tuple):
            given = source
        watch = self.watch_of(frozenset(map(id, given)))
        self._handles[average] = None
        if watch is None:
            return
        try:
            own = () if isinstance(source, nn.Module) else given
            handle = self.watch(average, watch.model, given=own, found=True)
        except (TypeError, ValueError) as error:
            _LOG.info("an average of the weights is not watched: %s", error)
        else:
            if not handle.reported:
                handle.remove()

    def _going_on(self) -> Iterator[bool]:
        return (handle is not None and not handle.removed for handle in self._handles.values())

    def end(self) -> None:
        """Watch no average any more, and look for none until a model is watched again."""
        for handle in (*self._handles.values(), *(ref() for ref in self._loose)):
            if handle is not None:
                handle.remove()
        self._handles.clear()
        self._loose, self._watches = [], []
        self.unwrap()

    def unwrap(self) -> None:
        """Give the classes their own methods back."""
        for (owner, method), original in self._wrapped.items():
            setattr(owner, method, original)
        self._wrapped.clear()
