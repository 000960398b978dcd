"""A bucket: watched tensors that are stepped in lock-step, gathered and measured as one flat sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from collage_optim.numerics.formats import CAST_FORMATS
from collage_optim.stepping import local_part
from torch import Tensor

from collage_agent.buckets.observation import (
    TILE_SLOTS,
    IntendedUpdate,
    ObservedStep,
    StepInputs,
    Values,
    sum_components,
    view_of,
)
from collage_agent.buckets.oracle_view import OracleView
from collage_agent.buckets.totals import BlockTotals
from collage_agent.intent.choose import Intent
from collage_agent.intent.clone import clone_value
from collage_agent.sample import stored
from collage_agent.sample.gather import BlockLayout, Staging
from collage_agent.sample.quantised import reading
from collage_agent.sample.sampling import TensorSample
from collage_agent.stats import MEASURES, StepView, Sums
from collage_agent.stats.blocks import on_host
from collage_agent.stats.casts import is_wider, largest_magnitude
from collage_agent.stats.counterfactuals import fp8_scales
from collage_agent.stats.edq import squared_block_sums
from collage_agent.stats.view import Copies, StoredWeights, table_of
from collage_monitor.definitions import Need
from collage_monitor.table import Table

__all__ = ["Bucket"]

_AS_KEPT: Final = "residual as kept"


class Bucket:
    """Gathers before and after a step and reduces the sample to block totals.

    `members` are indices of watched parameters; `whole`: every element of them is measured. Live values are kept in
    their own dtype in buffers that are made once; the fp64 work is done in tiles of slots that stay in the cache.
    Nothing here synchronises a device.
    """

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[Tensor],
        samples: Sequence[TensorSample],
        intent: Intent,
        *,
        knows_gradient: bool = True,
        copies: Mapping[str, Sequence[bool]] | None = None,
    ) -> None:
        """copies: the formats that copies of the weights are asked for in, and of which tensors they are known."""
        self.members = tuple(members)
        self.parameters = tuple(parameters)
        self.samples = tuple(samples)
        self.intent = intent
        self.knows_gradient = knows_gradient
        self.layout = BlockLayout(samples, parameters)
        self.whole = all(sample.whole for sample in samples)
        self._before: dict[str, Staging] = {}
        self._after: dict[str, Staging] = {}
        self._group: dict[str, Any] = {}
        self._decay: float | Tensor | None = None
        self._scalars: dict[str, Any] = {}
        self._keys_before: tuple[str, ...] = ()
        self._scales: Tensor | None = None
        self._copies = {
            key: torch.tensor(known).to(torch.float64).where(torch.tensor(known), torch.nan).to(self.layout.device)
            for key, known in (copies or {}).items()
        }
        self._of_tensor = [known for key, known in (copies or {}).items() if CAST_FORMATS[key].of_tensor]
        self.largest_before: Tensor | None = None
        self._padding, self._block_elements = [], []
        for slots in self._tiles():
            padding = [slot - slots.start for slot in self.layout.padding if slots.start <= slot < slots.stop]
            held = torch.full((slots.stop - slots.start,), 1.0, dtype=torch.float64)
            held[padding] = 0.0
            self._padding.append(torch.tensor(padding).to(torch.int64).to(self.layout.device))
            self._block_elements.append(held.view(-1, self.layout.block).sum(1).to(self.layout.device))

    @property
    def missing(self) -> frozenset[Need]:
        """What its steps lack of what statistics need."""
        lacking: list[Need] = [] if self.knows_gradient else ["gradient"]
        return frozenset([*lacking, "intended"] if self.intent.kind == "before-after" else lacking)

    @property
    def parameter_after(self) -> Tensor:
        """The registered weights at the sampled elements as `measure` last saw them: [slots], own dtype."""
        return self._after[stored.PARAMETER].values

    def gather_before(
        self,
        group: Mapping[str, Any],
        states: Sequence[Mapping[str, Any]],
        decay: float | Tensor | None = None,
        *,
        weights_gathered: bool = False,
    ) -> None:
        """Copy the sampled weights, gradients and states, and the group's numbers, before the step.

        `decay`: lr·λ where the optimizer decays weights apart from the gradient. `weights_gathered`:
        `weights_moved` has just gathered the weights.
        """
        self._decay = decay
        self._group = {key: clone_value(value) for key, value in group.items() if key != "params"}
        first = states[0] if states else {}
        self._scalars = clone_value(stored.scalar_state(self.parameters[0], first))
        keys = tuple(stored.elementwise_state(self.parameters[0], first))
        known = self._weights(keys) if weights_gathered else ()
        if not known:
            self._gather(self._before, stored.PARAMETER, self.parameters)
        for key in keys:
            if key not in known:
                self._gather_state(self._before, key, states)
        self._keys_before = (stored.PARAMETER, *keys)
        if self.knows_gradient:
            gradients = [self.intent.composition.gradient_of(parameter) for parameter in self.parameters]
            self._gather(self._before, stored.GRADIENT, gradients, lasting=False)
            self._keys_before += (stored.GRADIENT,)

    def measure(
        self,
        states: Sequence[Mapping[str, Any]],
        scale: Tensor | None,
        oracles: Sequence[OracleView],
        *,
        counterfactuals: bool = False,
    ) -> BlockTotals:
        """Gather again after the step, work out u and e, and reduce them to block totals.

        `scale`: what the gathered gradients are to be divided by; `counterfactuals`: also measure how much
        other storage strategies would have kept. Runs inside `isolated`.
        """
        self._scales = self._fp8_scales() if counterfactuals else None
        keys_after = (stored.PARAMETER, *stored.elementwise_state(self.parameters[0], states[0]))
        self._gather(self._after, stored.PARAMETER, self.parameters)
        for key in keys_after[1:]:
            self._gather_state(self._after, key, states)
        largest = self.largest_before, self.largest_weights(states)
        found = []
        for tile, slots in enumerate(self._tiles()):
            view = view_of(self._observed_step(tile, slots, keys_after, scale, largest))
            found.append(_measure_tile(view))
            for oracle in oracles:
                oracle.copy_tile(tile, view)
            del view  # Its memory, still in the cache, is that of the next one.
        return _combine_tiles(found)

    def intended(self, scale: Tensor | None) -> Tensor:
        """u of what was gathered before the step, fp64 [slots]; see `measure`."""
        found = torch.empty(self.layout.slots, dtype=torch.float64, device=self.layout.device)
        for slots in self._tiles():
            intended = found[slots]
            IntendedUpdate(
                self._step_inputs(slots, scale), torch.empty_like(intended), torch.empty_like(intended), intended
            )
        return found

    def gradient_at(self, blocks: Tensor) -> Tensor | None:
        """The gathered gradient in these blocks, [len(blocks) · block] in its own dtype; None: there is none."""
        if not self.knows_gradient:
            return None
        rows = self._before[stored.GRADIENT].values.view(-1, self.layout.block)
        return rows.index_select(0, blocks).view(-1)

    def weights_before(self) -> dict[str, Tensor]:
        """Copies of the gathered components of the weights, visible and stored, by key."""
        return {key: self._before[key].values.clone() for key in self._weights(self._keys_before)}

    def weights_after(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The components of the weights, visible and stored, gathered now; valid until the next gathering."""
        return {key: staging.values for key, staging in self._gather_weights(self._after, states).items()}

    def weights_moved(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the sampled weights differ, by their bits, from what `measure` last saw. It reads host values.

        Gathers into what the next `gather_before` fills.
        """
        found = self._gather_weights(self._before, states)
        return any(
            key not in self._after or not torch.equal(_bits(staging.values), _bits(self._after[key].values))
            for key, staging in found.items()
        )

    def largest_weights(self, states: Sequence[Mapping[str, Any]]) -> Tensor | None:
        """The largest |θ| of each tensor now, fp32 [tensors]; None: no copy has a scale that depends on it."""
        if not self._of_tensor:
            return None
        found = []
        for index, (parameter, state) in enumerate(zip(self.parameters, states, strict=True)):
            keys = stored.stored_parameter((stored.PARAMETER, *state), self.intent.composition)
            parts = [local_part(parameter if key == stored.PARAMETER else state[key]) for key in keys]
            known = self._of_tensor[0][index]
            found.append(largest_magnitude(parts) if known else torch.full((), torch.nan, device=parameter.device))
        return torch.stack(found)

    def gradient_squares(self) -> list[tuple[Tensor, Tensor]]:
        """Σ g² by block [blocks] of the sample; of whole tensors Σ g² and the largest g² [2, tensors]; fp64, now.

        Nothing if every tensor is measured whole, or no gradient is known; 0 of tensors that are. Two passes over
        the gradients.
        """
        if not self.knows_gradient:
            return []
        gradients = [self.intent.composition.gradient_of(parameter) for parameter in self.parameters]
        return self._squares(self._before, [stored.GRADIENT], [gradients])

    def momentum_squares(self, states: Sequence[Mapping[str, Any]]) -> list[tuple[Tensor, Tensor]]:
        """The same after `measure`, of states that have a sign: momenta, which steps may be proportional to.

        Without a sign it is none: a second moment is large where steps are not. Two passes over each.
        """
        found = []
        for key in stored.average_names(self._after, self.intent.composition):
            values = self._after[key].values
            plain = key in states[0] and reading(states[0], key) is states[0][key]
            if not (plain and values.is_floating_point()):
                continue
            signed = values.lt(0).any()
            if on_host(signed) and not signed:
                continue
            squares = self._squares(self._after, [key], [[state[key] for state in states]])
            found += [(sampled * signed, whole * signed) for sampled, whole in squares]
        return found

    def _squares(
        self, gathered: Mapping[str, Staging], keys: Sequence[str], tensors: Sequence[Sequence[Any]]
    ) -> list[tuple[Tensor, Tensor]]:
        if self.whole:
            return []
        values = [gathered[key].values.to(torch.float64).unsqueeze(0) for key in keys]
        sampled = [squared_block_sums(rows, self.layout.block)[0] for rows in values]
        return [
            (part, self.layout.whole_squares(self.samples, whole))
            for part, whole in zip(sampled, tensors, strict=True)
        ]

    def copies(
        self,
        before: Values,
        after: Values,
        largest: tuple[Tensor | None, Tensor | None],
        slots: slice = slice(None),
    ) -> Copies | None:
        """The copies of some slots, made of gathered weights and of `largest_weights` then and now; None: no
        format asked for is narrower than the weights are kept."""
        keys = stored.stored_parameter(after, self.intent.composition)
        dtypes = [after[key].dtype for key in keys]
        tensor_of_block = self.layout.tensor_of_block[_blocks(slots, self.layout.block)]
        known = {
            key: of[tensor_of_block] for key, of in self._copies.items() if is_wider(dtypes, CAST_FORMATS[key])
        }
        if not known:
            return None
        ends: list[StoredWeights] = []
        for values, magnitudes in zip((before, after), largest, strict=True):
            parts = {key: values[key][slots] for key in stored.stored_parameter(values, self.intent.composition)}
            total = next(iter(parts.values()))
            if len(parts) > 1:
                total = sum_components(parts, list(parts), torch.empty_like(total, dtype=torch.float64))
            ends.append(StoredWeights(total, None if magnitudes is None else magnitudes[tensor_of_block]))
        return Copies(ends[0], ends[1], known)

    def vacant(self) -> Tensor:
        """uint8 [slots], 1 where a slot holds nothing."""
        found = torch.zeros(self.layout.slots, dtype=torch.uint8, device=self.layout.device)
        for slots, padding in zip(self._tiles(), self._padding, strict=True):
            found[slots].index_fill_(0, padding, 1)
        return found

    def without_padding(self, values: Tensor) -> Tensor:
        """The same fp64 [slots] with 0 in the slots that hold nothing, in place."""
        for slots, padding in zip(self._tiles(), self._padding, strict=True):
            if len(padding):
                values[slots].index_fill_(0, padding, 0.0)
        return values

    def _tiles(self) -> Iterator[slice]:
        """The slots of each tile, in their order: those that are worked on together."""
        slots = self.layout.slots
        return (slice(start, min(start + TILE_SLOTS, slots)) for start in range(0, slots, TILE_SLOTS))

    def _weights(self, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((stored.PARAMETER, *stored.stored_parameter(keys, self.intent.composition))))

    def _step_inputs(self, slots: slice, scale: Tensor | None) -> StepInputs:
        return StepInputs(
            before={key: self._before[key].values[slots] for key in self._keys_before},
            group=self._group,
            scalars=self._scalars,
            decay=self._decay,
            intent=self.intent,
            scale=scale,
        )

    def _observed_step(
        self,
        tile: int,
        slots: slice,
        keys_after: Sequence[str],
        scale: Tensor | None,
        largest: tuple[Tensor | None, Tensor | None],
    ) -> ObservedStep:
        block = self.layout.block
        return ObservedStep(
            **vars(self._step_inputs(slots, scale)),
            after={key: self._after[key].values[slots] for key in keys_after},
            block=block,
            tensor_of_block=self.layout.tensor_of_block[_blocks(slots, block)],
            block_elements=self._block_elements[tile],
            tensors=len(self.members),
            padding=self._padding[tile],
            scales=None if self._scales is None else self._scales[_blocks(slots, block)],
            copies=self.copies(
                {key: self._before[key].values for key in self._keys_before},
                {key: self._after[key].values for key in keys_after},
                largest,
                slots,
            ),
        )

    def _fp8_scales(self) -> Tensor:
        weights = stored.stored_parameter(self._keys_before, self.intent.composition)
        values = self._before[weights[0]].values
        return fp8_scales(values, self.layout.tensor_of_block, len(self.members), self.layout.block)

    def _gather_weights(self, into: dict[str, Staging], states: Sequence[Mapping[str, Any]]) -> dict[str, Staging]:
        """The components of the weights, visible and stored, by key."""
        keys = self._weights((stored.PARAMETER, *stored.elementwise_state(self.parameters[0], states[0])))
        for key in keys:
            if key == stored.PARAMETER:
                self._gather(into, key, self.parameters)
            else:
                self._gather_state(into, key, states)
        return {key: into[key] for key in keys}

    def _gather_state(self, into: dict[str, Staging], key: str, states: Sequence[Mapping[str, Any]]) -> None:
        # All tensors of a bucket are stored in the same form: if the first is read as it is, so are the others.
        plain = reading(states[0], key) is states[0][key]
        tensors = [state[key] for state in states] if plain else [reading(state, key) for state in states]
        composition = self.intent.composition
        if key != composition.residual or (composition.sign > 0 and not composition.holds_counts(tensors[0].dtype)):
            self._gather(into, key, tensors, lasting=plain)
            return
        # The weight was gathered first: what integers beside it stand for depends on it.
        as_kept = self._gather(into, _AS_KEPT, tensors, lasting=plain)
        residual = into.get(key) or into.setdefault(key, Staging(self.layout, torch.float64))
        residual.values.copy_(composition.residual_of(into[stored.PARAMETER].values, as_kept.values))

    def _gather(
        self, into: dict[str, Staging], key: str, tensors: Sequence[Any], *, lasting: bool = True
    ) -> Staging:
        staging = into.get(key)
        dtype = tensors[0].dtype
        if staging is None or staging.values.dtype != dtype:
            other = (self._after if into is self._before else self._before).get(key)
            shared = other.views if other is not None and other.values.dtype == dtype else None
            staging = into[key] = Staging(self.layout, dtype, shared)
        self.layout.gather(tensors, staging, lasting=lasting)
        return staging


def _bits(values: Tensor) -> Tensor:
    """The same memory as integers: a NaN equals itself."""
    return values.view(torch.int64)


def _blocks(slots: slice, block: int) -> slice:
    """The blocks that these slots make up."""
    return slots if slots.stop is None else slice(slots.start // block, slots.stop // block)


def _measure_tile(view: StepView) -> list[Sums]:
    found = []
    for measure in MEASURES.values():
        sums = measure(view)
        found.append(sums if isinstance(sums, Sums) else Sums(sums))
    return found


def _combine_tiles(tiles: Sequence[Sequence[Sums]]) -> BlockTotals:
    """The tiles' sums together: those by block concatenated, those by tensor added; none of a failed measure."""
    by_block: list[Table[Tensor]] = []
    by_tensor: list[Table[Tensor]] = []
    for same_measure in zip(*tiles, strict=True):
        tables = [table for sums in same_measure if (table := table_of(sums.by_block)) is not None]
        if len(tables) == len(same_measure):
            by_block.append(_concatenate(tables, [table.array for table in tables]))
        tables = [table for sums in same_measure if (table := table_of(sums.by_tensor)) is not None]
        if len(tables) == len(same_measure):
            total = tables[0].array
            for table in tables[1:]:
                total = total + table.array
            by_tensor.append(Table(tables[0].statistics, None, total))
    return BlockTotals(by_block, by_tensor)


def _concatenate(tables: Sequence[Table[Tensor]], arrays: list[Tensor]) -> Table[Tensor]:
    return tables[0] if len(tables) == 1 else Table(tables[0].statistics, None, torch.cat(arrays, 1))
