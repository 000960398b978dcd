"""Averages of the weights that are watched: how their updates are noticed, and the handle that the user holds.

`watch_average` gives the handle; `step/average_meter.py` measures (`tests/agent/watching/test_average_watch.py`).
"""

from __future__ import annotations

import html
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any, Final, Literal, Protocol

import torch
from collage_optim.from_host import from_host
from collage_optim.names import dtype_name
from collage_optim.tensor_step import local_part
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from collage_agent.error_guard import Guard
from collage_agent.measurement import Layout, Measurement
from collage_agent.step.average_meter import AverageMeter
from collage_agent.training.averaged_tensors import (
    AveragedTensor,
    Share,
    averaged,
    averages_now,
    method_of,
    share_of,
)
from collage_agent.watch_options import WatchOptions
from collage_agent.watching.governor import Governor
from collage_agent.watching.watch_texts import average_in_words, average_word, summarise
from collage_monitor import wire
from collage_monitor.diagnosis import average_findings
from collage_monitor.totals_table import Axis, Table

__all__ = ["EVERY", "SAMPLE", "AverageWatch", "ModelWatch"]

EVERY: Final = 10
SAMPLE: Final = 1024
_THINNED: Final = 10
"""After ten measured updates only every tenth is measured, unless more are requested."""


class ModelWatch(Protocol):
    """The interface of the model's watch that an average needs to be reported."""

    model: nn.Module
    options: WatchOptions

    @property
    def removed(self) -> bool: ...
    @property
    def parameters(self) -> frozenset[int]:
        """Identities of the watched parameters."""

    def join(self, average: AverageWatch) -> Governor | None:
        """Report the average from now on; None: another average is reported already."""


class AverageWatch:
    """A watched average: `remove()` ends it, `summary()` gives the numbers, printing it says what they mean.

    An update is noticed where a known class makes it. For other averages call `before()` and `after()`. Otherwise
    an update is noticed at the optimizer's next step, by torch's count of writes to the averaged tensors, which
    misses writes through `.data`.
    """

    def __init__(
        self,
        average: object,
        model: nn.Module,
        decay: float | None,
        every: int,
        sample: int | Literal["all"],
        seed: int,
        given: Sequence[Tensor] = (),
        *,
        thins: bool = False,
        found: bool = False,
    ) -> None:
        """given: the averaged weights, in order; left out: the model's other weights.

        thins: after a while, measure a tenth of the updates that `every` names. found: not by the user.
        """
        WatchOptions(every=every, sample=sample)
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"decay={decay!r}; pass a number from 0 to 1, such as 0.9999, or None")
        tensors, self.left_out = averaged(average, model, given)
        self.method = method_of(average)
        self.found, self.may_return = found, False
        self.reported = False
        self.removed = False
        self._name = type(average).__name__
        self._decay, self._every, self._thins = decay, every, thins
        self._share: Share = None if decay is None else 1.0 - decay
        self._guard = Guard(stops_measuring=True)
        self._governor: Governor | None = None
        self._dtypes = " and ".join(dict.fromkeys(dtype_name(tensor.average.dtype) for tensor in tensors))
        self._layers = tuple(_layer(tensor) for tensor in tensors)
        self.parameters = frozenset(id(tensor.weight) for tensor in tensors)
        self._make_meter = partial(AverageMeter, sample=sample, seed=seed)
        with _undisturbed():
            self._meter: AverageMeter | None = self._make_meter(tensors)
        self._replaceable = averages_now(average, tensors) is not None
        self._decay_is_known_after = decay is None and hasattr(average, "shadow_params")
        # Lists and mappings have no identity to look up and are never called, so the watch keeps a reference.
        self._container = average if isinstance(average, Mapping | Sequence) else None
        self._tensors: Sequence[AveragedTensor] = tensors
        self._form = self._first_form()
        self._copies_first = isinstance(average, AveragedModel) and (
            not average.n_averaged.is_cpu or int(average.n_averaged) == 0
        )
        self._updates = 0
        self._last: list[Table[Tensor]] = []
        self._pending: list[Table[Tensor]] = []
        self._versions: tuple[int, int] | None = None
        self._inside = self._by_hand = False
        look = torch.compiler.disable(self._look)  # type: ignore[no-untyped-call]
        self._poll = None if self.method else register_optimizer_step_pre_hook(look)
        self._reports_to: weakref.ref[Any] | None = None
        self._chosen: dict[tuple[Axis, int], tuple[Tensor, Axis]] = {}
        if hasattr(average, "__weakref__"):
            # The watch must not keep an average alive that the training has dropped.
            weakref.finalize(average, self.remove).atexit = False

    def before(self) -> None:
        """Report that the average is about to be updated. Not needed for known classes; never raises."""
        if self.method is None and self._goes_on:
            self._by_hand = True
            with self._safely():
                self._announced(self._container)

    def after(self, decay: float | None = None) -> None:
        """Report that the average was updated from the present weights; `decay`: this update's, if it changes."""
        if self.method is None and self._goes_on:
            self._by_hand = True
            with self._safely():
                self._updated(self._container, self._share if decay is None else 1.0 - decay)
                if not self._versions:
                    self._prepare()

    def remove(self) -> None:
        """Stop watching; the numbers measured so far are kept. It may be called twice."""
        self.removed = True
        self._meter = self._container = None
        self._tensors = []
        if self._poll is not None:
            self._poll.remove()

    def report_with(self, watch: ModelWatch) -> None:
        """Have the watch of the model report this average, and count its cost."""
        before = None if self._reports_to is None else self._reports_to()
        if before is None or before.removed:
            governor = watch.join(self)
            self.reported = governor is not None
            self._governor = governor or self._governor
            self._reports_to = weakref.ref(watch) if self.reported else None

    def watch_removed(self) -> None:
        """Note that the watch that reports it has ended; an average that the agent found ends with it."""
        if self.found:
            self.may_return = True
            self.remove()

    def take(self, layers: Axis) -> list[Table[Tensor]]:
        """The measurements of these layers since the last call: a table for each part."""
        taken, self._pending = self._pending, []
        return [self._of(table, layers) for table in taken]

    def _of(self, table: Table[Tensor], layers: Axis) -> Table[Tensor]:
        """The table's columns of these layers."""
        own = table.layers
        assert own is not None
        if (chosen := self._chosen.get((own, len(layers)))) is None:
            places = [place for place, name in enumerate(own) if name in layers]
            columns = from_host(torch.tensor(places, dtype=torch.int64), table.array.device)
            chosen = self._chosen[own, len(layers)] = columns, Axis(own[place] for place in places)
        columns, axis = chosen
        if len(columns) == len(own):
            return table
        return Table(table.statistics, axis, table.array.index_select(1, columns))

    @property
    def bytes(self) -> float:
        """Bytes of the buffers kept between updates."""
        return 0.0 if self._meter is None else self._meter.bytes

    def summary(self) -> dict[str, Any]:
        """{"updates", "model": {key: value}, "layers": {name: {key: value}}} of the last measured update.

        Synchronises the device. Values are float or None (undefined). This process's shards only. Never raises:
        numbers that cannot be read are left out.
        """
        unknown = {"updates": self._updates, "model": {}, "layers": {}}
        return self._guard.answer("summary", self._summary, unknown)

    def _summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {"updates": self._updates, "model": {}, "layers": {}}
        if self._last:
            names = Axis(layer.name for layer in self._layers)
            first = self._last[0]
            array = torch.full((len(first), len(names)), torch.nan, dtype=torch.float64, device=first.array.device)
            for part in self._last:
                assert part.layers is not None
                array[:, names.positions(part.layers)] = part.array.to(array.device)
            layout = Layout(self._layers, tuple(first.statistics), wire.WatchInfo(optimizer=self._name))
            told = summarise(Measurement(layout, self._updates, 0.0, array))
            found |= {"model": told["model"], "layers": told["layers"]}
        return found

    def __str__(self) -> str:
        decay = "" if self._decay is None else f", decay {self._decay:g}"
        head = f"average of the weights ({self._name}, {self._dtypes}{decay})"
        if not self._last:
            noticed = "" if self.method or self._by_hand else "; call before() and after() around each"
            return "\n".join([f"{head}: no update was measured yet{noticed}", *self._notes()])
        model = self.summary()["model"]
        against = [finding.text for finding in average_findings(model)]
        lines = [f"{head}, {self._updates} updates: {average_word(model)}", *against, *average_in_words(model)]
        return "\n  ".join([*lines, *self._notes()])

    def __repr__(self) -> str:
        return f"<AverageWatch of {self._name}, {len(self._layers)} layers, {self._updates} updates>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _notes(self) -> Iterator[str]:
        if self.left_out:
            yield f"note: left out: {', '.join(self.left_out)}"
        if self._guard.reason:
            yield f"note: {self._guard.reason}"
        if not self.reported:
            yield "note: not reported: its model is not watched, or has another average that is"

    @property
    def _goes_on(self) -> bool:
        return self._meter is not None and not self._guard.disabled

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """Catch errors, count the cost, and make plain tensors, whatever mode the training averages in."""
        governor = self._governor
        try:
            with nullcontext() if governor is None else governor.timing(), _undisturbed():
                yield
        except Exception as error:
            self._guard.caught("looking at an average of the weights", error)

    def _announced(self, average: object) -> None:
        """Prepare for an update; a write to the average since the last one counts as a reset."""
        self._look_again(average)
        written = self._written()
        if self._form != self._first_form():
            self._updates, self._form = 0, self._first_form()
            self._meter = self._make_meter(self._tensors)
        elif self._versions and self._versions != written:
            self._start()
        self._versions = written
        self._prepare()

    def _updated(self, average: object, share: Share) -> None:
        self._look_again(average)
        assert self._meter is not None
        if self._copies_first or (isinstance(share, float) and share == 1.0):
            self._copies_first = False
            self._start()
        else:
            self._updates += 1
            measured = self._meter.update(share)
            if measured is not None:
                self._last = self._pending = measured
        if self._versions:
            self._versions = self._written()

    def _start(self) -> None:
        assert self._meter is not None
        self._updates = 0
        self._meter.start()

    def _prepare(self) -> None:
        """Keep the values before the next update if it is measured: the first update of all, and each that is the
        last one before a measured step."""
        assert self._meter is not None
        interval = self._every << (self._governor.doublings if self._governor is not None else 0)
        if self._thins and self._updates > _THINNED * interval:
            interval *= _THINNED
        if self._updates == 0 or (self._updates + 2) % interval == 0:
            self._meter.before()

    def _first_form(self) -> list[object]:
        """Device and dtype of the first weight and its average; if they change, all are watched again."""
        first = self._tensors[0]
        return [kind for part in (first.weight, first.average) for kind in (part.device, part.dtype)]

    def _written(self) -> tuple[int, int]:
        """The first average's present tensor and torch's count of writes to it; it represents all, because they are
        written together."""
        first = self._tensors[0].average
        return id(first), first._version

    def _look_again(self, average: object) -> None:
        """Take over the new tensor if the training replaced one of the average."""
        if average is None or not self._replaceable:
            return
        now = averages_now(average, self._tensors)
        if now is not None and not all(map(is_, now, [tensor.average for tensor in self._tensors])):
            assert self._meter is not None
            self._tensors = [replace(tensor, average=one) for tensor, one in zip(self._tensors, now, strict=True)]
            self._meter.replace(now)

    def _look(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Before a step of the optimizer, note whether the average was updated since the last one."""
        first = optimizer.param_groups[0]["params"]
        if self._by_hand or not self._goes_on or not any(id(weight) in self.parameters for weight in first):
            return
        with self._safely():
            self._look_again(self._container)
            written = self._written()
            if self._versions and written != self._versions:
                self._updated(None, self._share)
            self._versions = written
            self._prepare()

    def called(
        self, average: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[bool], None] | None:
        """The averaging method is called: what to do once it has returned; None: inside a call of its own."""
        if self._inside or not self._goes_on:
            return None
        self._inside = True
        share: Share = None
        with self._safely():
            self._announced(average)
            share = self._asked(average, args, kwargs)

        def returned(finished: bool) -> None:
            self._inside = False
            if finished and self._goes_on:
                with self._safely():
                    late = self._decay_is_known_after
                    self._updated(average, self._asked(average, args, kwargs) if late else share)

        return returned

    def _asked(self, average: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Share:
        return share_of(average, args, kwargs) if self._decay is None else self._share


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Create plain tensors and record no graph, whatever mode the training averages in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _layer(tensor: AveragedTensor) -> wire.Layer:
    return wire.Layer(
        name=tensor.name,
        shape=list(tensor.weight.shape),
        dtype=dtype_name(tensor.average.dtype),
        elements=local_part(tensor.average).numel(),
    )
