"""A bucket: watched tensors that are stepped in lock-step, gathered and measured as one flat sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from collage_agent.buckets.chunk import BlockTotals, Chunk, Observation
from collage_agent.buckets.intended import Before, Intended, Workspace
from collage_agent.intent.choose import Intent
from collage_agent.intent.clone import clone_value
from collage_agent.intent.oracle import Oracle
from collage_agent.sample import stored
from collage_agent.sample.gather import BlockLayout, Staging
from collage_agent.sample.quantised import reading
from collage_agent.sample.sampling import TensorSample
from collage_agent.stats import fp8_scales
from collage_agent.stats.histogram import BINS

__all__ = ["Bucket", "Followed"]

_SAME: Final = 1e-6
CHUNK_SLOTS: Final = 196_608


class Followed:
    """The blocks of a bucket that an oracle follows, and u, e and θ after the step at its elements."""

    def __init__(self, oracle: Oracle, bucket: Bucket) -> None:
        self.oracle = oracle
        tensors = [bucket.members.index(member) for member in oracle.members]
        positions = torch.from_numpy(bucket.layout.positions_of(oracle.layout, tensors))
        blocks = CHUNK_SLOTS // bucket.layout.block
        self.columns = torch.tensor(tensors)[torch.from_numpy(oracle.layout.host_columns)].to(oracle.layout.device)
        self._where = []
        for start in range(0, bucket.layout.blocks, blocks):
            target = torch.nonzero((positions >= start) & (positions < start + blocks)).view(-1)
            source = positions[target] - start
            self._where.append((source.to(oracle.layout.device), target.to(oracle.layout.device)))
        self.padding = torch.tensor(oracle.layout.padding, dtype=torch.int64).to(oracle.layout.device)
        self.rows = torch.zeros(3, oracle.layout.slots, dtype=torch.float64, device=oracle.layout.device)
        self.left_out = torch.zeros(oracle.layout.slots, dtype=torch.uint8, device=oracle.layout.device)

    def take(self, chunk: int, rows: Sequence[Tensor], left_out: Tensor) -> None:
        """Copy the followed elements of a chunk's rows (u, e, θ after)."""
        source, target = self._where[chunk]
        block = self.oracle.layout.block
        complete = len(target) == self.oracle.layout.blocks
        for row, values in zip((*self.rows, self.left_out), (*rows, left_out), strict=True):
            chosen, into = values.view(-1, block), row.view(-1, block)
            if complete:
                torch.index_select(chosen, 0, source, out=into)
            else:
                into.index_copy_(0, target, chosen.index_select(0, source))

    def differs(self, weights: Tensor) -> bool:
        """Whether these stored weights, fp64 [slots] on the host, are others than the last step left.

        By more than adding and subtracting them in fp64 can explain; what was not finite is not compared.
        """
        expected, now = self.rows[2].numpy(), weights.numpy()
        compared = self.left_out.numpy() == 0
        if len(self.padding):
            compared[self.padding.numpy()] = False
        error = np.abs(now - expected)[compared]
        size = np.abs(expected)[compared]
        return bool((error > _SAME * (size + size.max(initial=0.0) * _SAME)).any())


class Bucket:
    """Gathers before and after a step and reduces the sample to block totals.

    `members` are indices of watched parameters. Buffers are made once: live values in their own dtype, the fp64
    work in chunks that stay in the cache, in a `workspace` that buckets measured in turn may share. Nothing here
    synchronises a device.
    """

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[Tensor],
        samples: Sequence[TensorSample],
        intent: Intent,
        *,
        knows_gradient: bool = True,
        workspace: Workspace | None = None,
    ) -> None:
        self.members = tuple(members)
        self.parameters = tuple(parameters)
        self.samples = tuple(samples)
        self.intent = intent
        self.knows_gradient = knows_gradient
        self.layout = BlockLayout(samples, parameters)
        self._before: dict[str, Staging] = {}
        self._after: dict[str, Staging] = {}
        self._group: dict[str, Any] = {}
        self._decay: float | Tensor | None = None
        self._scalars: dict[str, Any] = {}
        self._keys_before: tuple[str, ...] = ()
        self._scales: Tensor | None = None
        self._workspace = workspace or Workspace()
        self._padding = [
            torch.tensor([slot - start for slot in self.layout.padding if start <= slot < start + CHUNK_SLOTS])
            .to(torch.int64)
            .to(self.layout.device)
            for start in range(0, self.layout.slots, CHUNK_SLOTS)
        ]

    @property
    def parameter_after(self) -> Tensor:
        """The registered weights at the sampled elements as `measure` last saw them: [slots], own dtype."""
        return self._after[stored.PARAMETER].values

    def gather_before(
        self,
        group: Mapping[str, Any],
        states: Sequence[Mapping[str, Any]],
        decay: float | Tensor | None = None,
    ) -> None:
        """Copy the sampled weights, gradients and states, and the group's numbers, before the step.

        `decay`: lr·λ where the optimizer decays weights apart from the gradient.
        """
        self._decay = decay
        self._group = {key: clone_value(value) for key, value in group.items() if key != "params"}
        first = states[0] if states else {}
        self._scalars = clone_value(stored.scalar_state(self.parameters[0], first))
        keys = tuple(stored.elementwise_state(self.parameters[0], first))
        self._gather(self._before, stored.PARAMETER, self.parameters)
        for key in keys:
            self._gather_state(self._before, key, states)
        self._keys_before = (stored.PARAMETER, *keys)
        if self.knows_gradient:
            gradients = [parameter.grad for parameter in self.parameters]
            self._gather(self._before, stored.GRADIENT, gradients, lasting=False)
            self._keys_before += (stored.GRADIENT,)

    def measure(
        self,
        states: Sequence[Mapping[str, Any]],
        scale: Tensor | None,
        followed: Sequence[Followed],
        *,
        counterfactuals: bool = False,
    ) -> BlockTotals:
        """Gather again after the step, work out u and e, and reduce them to block totals.

        `scale`: what the gathered gradients are to be divided by; `counterfactuals`: add what other ways of keeping
        the weights would have kept. Runs inside `isolated`.
        """
        self._scales = self._fp8_scales() if counterfactuals else None
        keys_after = (stored.PARAMETER, *stored.elementwise_state(self.parameters[0], states[0]))
        self._gather(self._after, stored.PARAMETER, self.parameters)
        for key in keys_after[1:]:
            self._gather_state(self._after, key, states)
        pieces = []
        octaves, fills = torch.zeros(2, BINS, len(self.members), dtype=torch.float64, device=self.layout.device)
        for index, start in enumerate(range(0, self.layout.slots, CHUNK_SLOTS)):
            chunk = Chunk(self._observation(index, slice(start, start + CHUNK_SLOTS), keys_after, scale))
            pieces.append(chunk.totals(octaves, fills))
            for oracle in followed:
                oracle.take(index, (chunk.intended, chunk.effective, chunk.parameter_after), chunk.left_out)
        return _put_together(pieces)

    def intended(self, scale: Tensor | None) -> Tensor:
        """u of what was gathered before the step, fp64 [slots], valid until the next call; see `measure`."""
        found = self._workspace.buffer("intended", self.layout.device, self.layout.slots)
        for start in range(0, self.layout.slots, CHUNK_SLOTS):
            slots = slice(start, start + CHUNK_SLOTS)
            intended = found[slots]
            rows = self._workspace.buffer("rows", self.layout.device, 2, len(intended))
            Intended(self._seen_before(slots, scale), rows[0], rows[1], intended)
        return found

    def weights_before(self) -> dict[str, Tensor]:
        """Copies of the gathered components of the weights, visible and stored, by key."""
        return {key: self._before[key].values.clone() for key in self._weights(self._keys_before)}

    def weights_after(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The components of the weights, visible and stored, gathered now; valid until the next gathering."""
        keys = self._weights((stored.PARAMETER, *stored.elementwise_state(self.parameters[0], states[0])))
        for key in keys:
            if key == stored.PARAMETER:
                self._gather(self._after, key, self.parameters)
            else:
                self._gather_state(self._after, key, states)
        return {key: self._after[key].values for key in keys}

    def without_padding(self, values: Tensor) -> Tensor:
        """The same fp64 [slots] with 0 in the slots that hold nothing, in place."""
        for index, start in enumerate(range(0, self.layout.slots, CHUNK_SLOTS)):
            if len(self._padding[index]):
                values[start : start + CHUNK_SLOTS].index_fill_(0, self._padding[index], 0.0)
        return values

    def _weights(self, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((stored.PARAMETER, *stored.stored_parameter(keys, self.intent.kept))))

    def _seen_before(self, slots: slice, scale: Tensor | None) -> Before:
        return Before(
            before={key: self._before[key].values[slots] for key in self._keys_before},
            group=self._group,
            scalars=self._scalars,
            decay=self._decay,
            intent=self.intent,
            scale=scale,
            workspace=self._workspace,
        )

    def _observation(
        self, chunk: int, slots: slice, keys_after: Sequence[str], scale: Tensor | None
    ) -> Observation:
        block = self.layout.block
        return Observation(
            **vars(self._seen_before(slots, scale)),
            after={key: self._after[key].values[slots] for key in keys_after},
            block=block,
            columns=self.layout.columns[slots.start // block : slots.stop // block],
            tensors=len(self.members),
            padding=self._padding[chunk],
            scales=None if self._scales is None else self._scales[slots.start // block : slots.stop // block],
        )

    def _fp8_scales(self) -> Tensor:
        weights = stored.stored_parameter(self._keys_before, self.intent.kept)
        values = self._before[weights[0]].values
        return fp8_scales(values, self.layout.columns, len(self.members), self.layout.block)

    def _gather_state(self, into: dict[str, Staging], key: str, states: Sequence[Mapping[str, Any]]) -> None:
        # Tensors of a bucket are kept alike: where the first is read as it is, so are the others.
        plain = reading(states[0], key) is states[0][key]
        tensors = [state[key] for state in states] if plain else [reading(state, key) for state in states]
        self._gather(into, key, tensors, lasting=plain)

    def _gather(self, into: dict[str, Staging], key: str, tensors: Sequence[Any], *, lasting: bool = True) -> None:
        staging = into.get(key)
        if staging is None or staging.values.dtype != tensors[0].dtype:
            staging = into[key] = Staging(self.layout, tensors[0].dtype)
        self.layout.gather(tensors, staging, lasting=lasting)
        if key == self.intent.kept.residual and self.intent.kept.sign < 0:
            staging.values.neg_()


def _put_together(pieces: Sequence[BlockTotals]) -> BlockTotals:
    if len(pieces) == 1:
        return pieces[0]
    return BlockTotals(
        squares=torch.cat([piece.squares for piece in pieces], 1),
        products=torch.cat([piece.products for piece in pieces], 1),
        classes=torch.cat([piece.classes for piece in pieces], 1),
        further=[
            (alike[0][0], torch.cat([sums for _, sums in alike], 1))
            for alike in zip(*(piece.further for piece in pieces), strict=True)
        ],
        octaves=pieces[0].octaves,
        fills=pieces[0].fills,
    )
