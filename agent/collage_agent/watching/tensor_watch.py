"""Any tensor that something else than a watched optimizer moves: what was intended, and what arrived.

A buffer that the training balances by hand, weights that adapters are merged into, an average of one's own. The
totals stay on the tensor's device until somebody reads them (`tests/agent/watching/test_tensor_watch.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from collage_optim.names import dtype_name
from collage_optim.tensor_step import local_part
from torch import Tensor

from collage_agent.error_guard import Guard
from collage_monitor.diagnosis import average_findings

__all__ = ["TensorWatch", "watch_tensor"]

_SAMPLE: Final = 2**16
_SUMS: Final = ("squared", "effective", "variance", "active", "lost")


def watch_tensor(name: str, tensor: Tensor, *, sample: int = _SAMPLE) -> TensorWatch:
    """Measure how the updates of any tensor arrive, compared with an fp64 twin.

    For what no watched optimizer steps: a buffer that the training moves by hand, weights that adapters are merged
    into. Call `before()` and `after(intended)` of the returned handle around each update; print the handle, or pass
    its `scalars()` to `log`. name: what the tensor is called there. sample: elements that are looked at, at equal
    distances, all of a smaller tensor; each takes 25 bytes on the tensor's device. Synchronises no device.

    Raises:
        TypeError, ValueError: an argument that cannot be used.
    """
    return TensorWatch(name, tensor, sample)


class TensorWatch:
    """A watched tensor: `summary()` gives the numbers, printing it says what they mean, `remove()` ends it."""

    def __init__(self, name: str, tensor: Tensor, sample: int) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"name={name!r}; pass a text, such as 'expert_bias'")
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_meta:
            found = dtype_name(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"tensor={found}; pass a floating-point tensor that holds numbers")
        if isinstance(sample, bool) or not isinstance(sample, int) or sample < 1:
            raise ValueError(f"sample={sample!r}; pass a number of elements, 1 or more")
        self.name, self.removed = name, False
        self._tensor = tensor
        self._stride = _stride_of(tensor, sample)
        self._guard = Guard(stops_measuring=True)
        self._before: Tensor | None = None
        self._updates = 0
        with torch.inference_mode(False), torch.no_grad():
            start = self._now()
            self._start, self._exact = start, start.clone()
            self._moved = torch.zeros_like(start, dtype=torch.bool)
            self._totals = start.new_zeros(len(_SUMS))

    def before(self) -> None:
        """Say that the tensor is about to be updated. Synchronises nothing; never raises."""
        self._safely(self._keep)

    def after(self, intended: Tensor | float) -> None:
        """Say that it was: by `intended`, a displacement of its shape in a dtype that holds it, or one number.

        The displacement is what exact arithmetic would have added, sign included. Synchronises nothing; never
        raises: an update that cannot be measured is left out, with a warning.
        """
        self._safely(lambda: self._measure(intended))

    def remove(self) -> None:
        """Stop watching; the numbers are kept."""
        self.removed = True
        self._before = None

    def scalars(self) -> dict[str, Tensor]:
        """{"NAME/edq_ratio": Σue / Σu², "NAME/lost_ratio": …} over all updates so far, for `collage_agent.log`.

        Scalars on the tensor's device, which is not waited for; NaN: undefined. Empty before the first update.
        """
        with torch.inference_mode(False), torch.no_grad():
            ratios = self._ratios() if self._updates else {}
        return {f"{self.name}/{key}": ratios[key] for key in ("edq_ratio", "lost_ratio") if ratios}

    def summary(self) -> dict[str, Any]:
        """{"updates", "edq_ratio", "edq_noise_ratio", "lost_ratio", "moved_ratio", "displacement_ratio",
        "drift_ratio"} over all updates so far, of this process's part; None: undefined. Synchronises the device."""
        with torch.inference_mode(False), torch.no_grad():
            return {"updates": self._updates, **{key: _known(value) for key, value in self._ratios().items()}}

    def __str__(self) -> str:
        dtype, found = dtype_name(self._tensor.dtype), self.summary()
        head = f"{self.name} ({dtype}, {local_part(self._tensor).numel():,} elements)"
        notes = [f"note: {self._guard.reason}"] if self._guard.reason else []
        if not self._updates:
            told = f"{head}: no update was measured yet; call before(), and after(intended), around each"
            return "\n  ".join([told, *notes])
        metrics = {f"average_{key}": value for key, value in found.items()}
        against = [finding.text for finding in average_findings(metrics, self.name)]
        word = "updates are lost" if against else "unknown" if found["edq_ratio"] is None else "healthy"
        way = f"{found['displacement_ratio']:.4f}" if found["displacement_ratio"] is not None else "unknown"
        lines = [f"{head}, {self._updates:,} updates: {word}", *against]
        lines.append(f"EDQ {_text(found['edq_ratio'])}; {way} of an fp64 twin's way")
        if against and found["lost_ratio"]:
            lines.append(f"keep {self.name} in float32, or round it stochastically")
        return "\n  ".join([*lines, *notes])

    def __repr__(self) -> str:
        return f"<TensorWatch of {self.name}, {self._updates} updates>"

    def _safely(self, do: Callable[[], None]) -> None:
        if self.removed or self._guard.disabled:
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                do()
        except ValueError as error:
            self._guard.refused(f"{self.name}.after", error)
        except Exception as error:
            self._before = None
            self._guard.caught(f"measuring {self.name}", error)

    def _now(self) -> Tensor:
        """The sampled elements, fp64 [sampled], a copy."""
        return self._sampled(self._tensor).to(torch.float64, copy=True)

    def _sampled(self, tensor: Tensor) -> Tensor:
        return local_part(tensor.detach()).reshape(-1)[:: self._stride]

    def _keep(self) -> None:
        self._before = self._now()

    def _measure(self, intended: Tensor | float) -> None:
        before, self._before = self._before, None
        if before is None:
            raise ValueError("after() without before(): call both around each update")
        if not isinstance(intended, Tensor):
            update = torch.full_like(before, float(intended))
        elif intended.shape == self._tensor.shape:
            update = self._sampled(intended).to(before)
        else:
            shapes = f"{tuple(intended.shape)}, the tensor {tuple(self._tensor.shape)}"
            raise ValueError(f"intended has shape {shapes}: pass the displacement of each element")
        effective = self._now() - before
        self._moved |= effective.ne(0)
        self._exact += update
        active = update.ne(0)
        squares, products = update * update, update * effective
        self._totals += torch.stack(
            [
                squares.sum(),
                products.sum(),
                (products - squares).square().sum(),
                active.sum().to(torch.float64),
                (active & effective.eq(0)).sum().to(torch.float64),
            ]
        )
        self._updates += 1

    def _ratios(self) -> dict[str, Tensor]:
        """Over all updates, scalars on the tensor's device; NaN: undefined."""
        squared, effective, variance, active, lost = self._totals.unbind()
        way, exact = self._now() - self._start, self._exact - self._start
        return {
            "edq_ratio": effective / squared,
            "edq_noise_ratio": variance.sqrt() / squared,
            "lost_ratio": lost / active,
            "moved_ratio": self._moved.to(torch.float64).mean(),
            "displacement_ratio": (exact * way).sum() / exact.square().sum(),
            "drift_ratio": (way - exact).norm() / exact.norm(),
        }


def _stride_of(tensor: Tensor, most: int) -> int:
    """The distance of the sampled elements; it shares no factor with a row's length, so that columns take turns."""
    whole = local_part(tensor.detach())
    stride, row = max(-(-whole.numel() // most), 1), whole.shape[-1] if whole.dim() else 1
    while stride > 1 and math.gcd(stride, row) > 1:
        stride += 1
    return stride


def _known(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _text(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio:.4f}"
