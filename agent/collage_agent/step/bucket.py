"""A bucket: watched tensors that are stepped in lock-step, gathered and measured as one flat sample.

`bucket_planner.py` makes it, `measurer.py` calls it before and after each measured step. `layout.py` and
`gather.py` compute once, at the plan, everything that stays fixed until the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from collage_optim import CollageOptimizer
from collage_optim.from_host import from_host
from collage_optim.integer_codes import unpacked
from collage_optim.numerics.cast_formats import route_of
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.intent_choice import Intent
from collage_agent.intent.optimizer_clone import clone_entries, clone_settings
from collage_agent.sample.sampling import TensorSample
from collage_agent.sample.state_mappings import state_of
from collage_agent.sample.stored_parts import GRADIENT, PARAMETER, elementwise_dtypes
from collage_agent.stats import replicas
from collage_agent.stats.casts import is_wider
from collage_agent.stats.counterfactuals import fp8_scales
from collage_agent.stats.optimizer_state import residuals_left
from collage_agent.stats.step_view import Copies, LargestWeights, StepView, StoredWeights
from collage_agent.step.gather import BlockLayout, GatheredSample
from collage_agent.step.layout import (
    StateLayout,
    StepLayout,
    decoupled_rate,
    out_of_lock_step,
    stepped_since_kept,
)
from collage_agent.step.missed_shares import MissedShares
from collage_agent.step.observed_step import (
    Follows,
    IntendedUpdate,
    KeptWeights,
    ObservedStep,
    Scratch,
    Tile,
    tiles_of,
    view_of,
)
from collage_agent.step.oracle import OracleView
from collage_agent.step.scale_regions import ScaleRegions, WholeWeight
from collage_agent.step.totals import (
    SIZE_ROWS,
    BlockTotals,
    SampleSizes,
    combine_tiles,
    estimated_totals,
    measure_tile,
)
from collage_monitor.definitions import Need
from collage_monitor.totals_table import Axis, Table

__all__ = [
    "Bucket",
    "LOOK_EVERY",
]

_CHECKSUMS: Final = Axis(replicas.KEYS)
LOOK_EVERY: Final = 10
"""Measured steps from one look at whole gradients and momenta to the next."""


class Bucket:
    """The fixed properties, until the next plan, of tensors that are stepped alike, and their values around a step.

    `members` are indices of watched parameters, of parameter group number `group`; their layers are `layers`.
    `whole`: every element of them is measured. Live values are kept in their own dtype in buffers that are made
    once; the fp64 work is done in tiles of slots that stay in the cache. Nothing here synchronises a device.

    The life of a bucket:

    1. `Planner` makes it. It sets `oracles`, which observe the bucket, and `replicated` bool [tensors]: whether
    other ranks hold the tensor, too; None: none. Then `StepMeasurer` calls `take_over` with the previous buckets.
    2. Before a measured step `StepMeasurer`, or `Rotation` for a tensor whose turn it is, sets `follows` (the
       step's predecessor) and calls `gather_before`, then `look_at_whole`. The former sets `out_of_step` bool
       [tensors]: which have another step counter than the first; None: none can have. Then `Oracles` reads
       `gradient_at`.
    3. After the step, whoever called `gather_before` calls `measure`.
    4. Before the next step `Oracles` may ask for `weights_moved`, which gathers the weights. If that step is
       measured, `gather_before` is told `weights_gathered`.

    `Windows` has buckets of its own, without oracles. It calls `gather_before`, and reads `intended`, the weights
    and the copies made of them; it never calls `measure`.

    `TouchedBucket` draws its sample in `gather_before`, adapts the totals in `measure`, reads no whole tensors and
    remembers no residuals. The bucket of `Rotation` clones its one tensor in `gather_before` and has the clone
    stepped in `measure`.
    """

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[Tensor],
        samples: Sequence[TensorSample],
        intent: Intent,
        group: int,
        layers: Axis,
        *,
        knows_gradient: bool = True,
        copies: Mapping[str, Sequence[bool]] | None = None,
        scratch: Scratch | None = None,
        layout: BlockLayout | None = None,
    ) -> None:
        """copies: the formats that copies of the weights are asked for in, and of which tensors they are known."""
        self.members = tuple(members)
        self.parameters = tuple(parameters)
        self.samples = tuple(samples)
        self.intent = intent
        self.group = group
        self.layers = layers
        self.oracles: Sequence[OracleView] = ()
        self.replicated: Tensor | None = None
        self.keeps_by_name = False
        self.out_of_step: Tensor | None = None
        self.knows_gradient = knows_gradient
        self.layout = BlockLayout(samples, parameters) if layout is None else layout
        self.sizes = SampleSizes(samples, self.layout)
        self.whole = all(sample.whole for sample in samples)
        lacking: list[Need] = [] if knows_gradient else ["gradient"]
        self.missing = frozenset([*lacking, "intended"] if intent.kind == "before-after" else lacking)
        """What its steps lack of what statistics need."""
        known = {key: torch.tensor(of) for key, of in (copies or {}).items()}
        self._copies = {
            key: from_host(of.to(torch.float64).where(of, torch.nan), self.layout.device)
            for key, of in known.items()
        }
        regions = ScaleRegions(self.layout, samples, parameters, copies or {})
        self._regions = regions if regions else None
        self._tiles = tiles_of(self.layout)
        self._scratch = Scratch() if scratch is None else scratch
        self._before, self._after = GatheredSample.pair(self.layout, intent.composition)
        self._states: StateLayout | None = None
        self._step_layout: StepLayout | None = None
        self._formats: list[dict[str, Tensor]] = []
        self._hyperparameters: dict[str, Any] = {}
        self._scalars: dict[str, Any] = {}
        self._decay: float | Tensor | None = None
        self._largest: LargestWeights | None = None
        self.follows: Follows = "other steps"
        self._held: Tensor | None = None
        self._launch: tuple[bool | Tensor, bool | Tensor] | None = None
        self._measured = 0
        self._looks = False
        self._missed = MissedShares(self.samples, self.layout, torch.zeros_like(self.sizes.elements))

    @property
    def parameter_after(self) -> Tensor:
        """The registered weights at the sampled elements as `measure` last saw them: [slots], own dtype."""
        return self._after.values[PARAMETER]

    def states(self, optimizer: Optimizer) -> list[Mapping[str, Any]]:
        """The optimizer's state for each tensor of the bucket."""
        # .get: the state is a defaultdict, and an entry that it makes would be the agent's doing.
        if self.keeps_by_name:
            states = [optimizer.state.get(parameter, {}) for parameter in self.parameters]
            return [*map(unpacked, states)] if isinstance(optimizer, CollageOptimizer) else states
        return [state_of(optimizer, parameter) for parameter in self.parameters]

    def gather_before(self, optimizer: Optimizer, *, weights_gathered: bool = False) -> None:
        """Copy the sampled weights, gradients and states, and the group's numbers, before the step.

        Also compares the tensors' step counters. `weights_gathered`: `weights_moved` has just gathered the weights.
        """
        self.intent.refresh(optimizer)
        states, group = self.states(optimizer), optimizer.param_groups[self.group]
        self.out_of_step = out_of_lock_step(states)
        self._decay = decoupled_rate(optimizer, group, apart=self.intent.composition.decays_apart)
        self._hyperparameters = clone_settings(group)
        first, layout = states[0], self._layout_of(states)
        self._states = layout
        self._scalars = clone_entries({key: first[key] for key in layout.scalars})
        self._launch = stepped_since_kept(group, first) if self.follows == "nothing" else None
        self._before.gather(
            layout.others if weights_gathered else layout.kept,
            states,
            weights=None if weights_gathered else self.parameters,
            gradients=self._gradients() if self.knows_gradient else None,
        )

    def look_at_whole(self, optimizer: Optimizer) -> None:
        """After `gather_before` of a measured step, read whole tensors if the sample is not enough.

        The largest weights, if a copy's scale needs them; every LOOK_EVERY measured steps also the gradients, to
        estimate what the sample misses. A pass over each. Synchronises nothing.
        """
        self._largest = self.largest_weights(optimizer)
        self._looks = not self.whole and self._measured % LOOK_EVERY == 0
        self._look_at_gradients()
        self._measured += 1

    def gather_gradients_again(self) -> None:
        """After a step that made the gradients final itself, gather the gradients that it used."""
        if self.knows_gradient:
            self._before.gather((), (), gradients=self._gradients())
        self._look_at_gradients()

    def _look_at_gradients(self) -> None:
        if self._looks:
            sampled = self._before.values[GRADIENT] if self.knows_gradient else None
            self._missed.begin(sampled, self._gradients())

    def measure(
        self, optimizer: Optimizer, scale: Tensor | None, *, counterfactuals: bool = False
    ) -> list[Table[Tensor]]:
        """Estimated totals of the step just taken: the bucket's, its replicas' checksums, its oracles'.

        `scale`: what the gathered gradients are to be divided by; `counterfactuals`: also measure how much other
        storage strategies would have kept. Runs inside `isolated`.
        """
        blocks, states = self._block_totals(optimizer, scale, counterfactuals)
        if self._looks:
            assert self._step_layout is not None
            self._missed.end(blocks, self.sizes, self._step_layout.after, self._after.values, states)
        table = estimated_totals(blocks, self.sizes, self.layers, self.missing, self._missed.shares)
        if self.out_of_step is not None:
            table = Table(table.statistics, self.layers, torch.where(self.out_of_step, torch.nan, table.array))
        if self._missed.unseen is not None:
            rest = torch.where(self._missed.unseen, torch.nan, table.array[SIZE_ROWS:])
            table = Table(table.statistics, self.layers, torch.cat((table.array[:SIZE_ROWS], rest)))
        found = [table]
        if self.replicated is not None:
            sizes, block = self.sizes, self.layout.block
            sums = replicas.replica_sums(
                self.parameter_after, block, sizes.segments, sizes.sampled, self.replicated
            )
            found.append(Table(_CHECKSUMS, self.layers, sums))
        return found + [oracle.totals() for oracle in self.oracles]

    def intended(self, scale: Tensor | None) -> Tensor:
        """u from the values gathered before the step, fp64 [slots]; see `measure`."""
        assert self._states is not None
        layout = StepLayout(self._states, self._states)
        found = torch.empty(self.layout.slots, dtype=torch.float64, device=self.layout.device)
        for number, tile in enumerate(self._tiles):
            intended = found[tile.slots]
            step = self._observed_step(number, layout, scale, is_taken=False)
            IntendedUpdate(step, torch.empty_like(intended), torch.empty_like(intended), intended)
        return found

    def gradient_at(self, blocks: Tensor) -> Tensor | None:
        """The gathered gradient in these blocks, [len(blocks) · block] in its own dtype; None: there is none."""
        if not self.knows_gradient:
            return None
        rows = self._before.values[GRADIENT].view(-1, self.layout.block)
        return rows.index_select(0, blocks).view(-1)

    def weights_before(self) -> KeptWeights:
        """Copies of the gathered components of the weights."""
        assert self._states is not None
        values = {key: self._before.values[key].clone() for key in self._states.weight_keys}
        return KeptWeights(values, self._states.stored)

    def weights_after(self, optimizer: Optimizer) -> KeptWeights:
        """The components of the weights gathered now; valid until the next gathering."""
        states = self.states(optimizer)
        layout = self._layout_of(states)
        self._after.gather(layout.weights, states, weights=self.parameters)
        return KeptWeights({key: self._after.values[key] for key in layout.weight_keys}, layout.stored)

    def weights_moved(self, optimizer: Optimizer) -> bool:
        """Whether the sampled weights differ, by their bits, from what `measure` last saw. It reads host values.

        Gathers into the buffers that the next `gather_before` fills.
        """
        states, known = self.states(optimizer), self._after.values
        layout = self._layout_of(states)
        self._before.gather(layout.weights, states, weights=self.parameters)
        return any(
            key not in known or not torch.equal(_bits(self._before.values[key]), _bits(known[key]))
            for key in layout.weight_keys
        )

    def largest_weights(self, optimizer: Optimizer) -> LargestWeights | None:
        """The largest |θ| around each block now; None: no copy has a scale that depends on more than the block."""
        if not self._regions:
            return None
        states = self.states(optimizer)
        layout = self._layout_of(states)
        tensors = zip(self.parameters, states, self.samples, strict=True)
        composition = self.intent.composition
        return self._regions.largest(
            [WholeWeight.of(parameter, state, layout, composition, sample) for parameter, state, sample in tensors]
        )

    def copies(
        self,
        before: KeptWeights,
        after: KeptWeights,
        largest: tuple[LargestWeights | None, LargestWeights | None],
    ) -> Copies | None:
        """The copies of all slots, made of gathered weights and of `largest_weights` then and now; None: no format
        asked for is narrower than the weights are kept."""
        tensor_of_block = self.layout.tensor_of_block
        known = {key: of[tensor_of_block] for key, of in self._formats_below(after.dtypes).items()}
        ends = [StoredWeights(kept.total(), found) for kept, found in zip((before, after), largest, strict=True)]
        return Copies(ends[0], ends[1], known) if known else None

    def vacant(self) -> Tensor:
        """uint8 [slots], 1 where a slot holds nothing."""
        found = torch.zeros(self.layout.slots, dtype=torch.uint8, device=self.layout.device)
        for tile in self._tiles:
            found[tile.slots].index_fill_(0, tile.padding, 1)
        return found

    def without_padding(self, values: Tensor) -> Tensor:
        """The same fp64 [slots] with 0 in the slots that hold nothing, in place."""
        for tile in self._tiles:
            if len(tile.padding):
                values[tile.slots].index_fill_(0, tile.padding, 0.0)
        return values

    def _layout_of(self, states: Sequence[Mapping[str, Any]]) -> StateLayout:
        """The layout of the first tensor's state; rebuilt only if the state has changed.

        It holds for all that were planned with their states. Where the step made these, it has what all keep alike.
        """
        first = state = states[0]
        for known in (self._states, None if self._step_layout is None else self._step_layout.after):
            if known is not None and known.fits(first):
                return known
        if self._states is not None:
            each = [dict(elementwise_dtypes(*own)) for own in zip(self.parameters, states, strict=True)]
            apart = {key for key, dtype in each[0].items() if any(own.get(key) != dtype for own in each)}
            state = {key: value for key, value in first.items() if key not in apart}
        return StateLayout.of(self.parameters[0], state, self.intent.composition)

    def _step_layout_to(self, after: StateLayout) -> StepLayout:
        """The layout of the step from the states gathered before it to these."""
        known = self._step_layout
        assert self._states is not None
        if known is None or known.before is not self._states or known.after is not after:
            known = self._step_layout = StepLayout(self._states, after)
            of_stored = [self._after.values[key].dtype for key in after.stored]
            formats = self._formats_below(of_stored).items()
            self._formats = [{key: of[tile.tensor_of_block] for key, of in formats} for tile in self._tiles]
        return known

    def _formats_below(self, dtypes: Sequence[torch.dtype]) -> dict[str, Tensor]:
        """The formats of copies that are narrower than weights that are sums of these dtypes."""
        return {key: of for key, of in self._copies.items() if is_wider(dtypes, route_of(key))}

    def _block_totals(
        self, optimizer: Optimizer, scale: Tensor | None, counterfactuals: bool
    ) -> tuple[BlockTotals, Sequence[Mapping[str, Any]]]:
        """Gather again after the step, work out u and e, and reduce them to block totals."""
        states = self.states(optimizer)
        after = self._layout_of(states)
        self._after.gather(after.kept, states, weights=self.parameters)
        layout = self._step_layout_to(after)
        scales = self._fp8_scales() if counterfactuals else None
        largest = self._largest, self.largest_weights(optimizer)
        found = []
        for number, tile in enumerate(self._tiles):
            step = self._observed_step(number, layout, scale, scales, largest)
            view = view_of(step, self._scratch)
            found.append(measure_tile(view))
            self._remember(view, tile)
            for oracle in self.oracles:
                oracle.copy_tile(number, view)
            del view  # The next view reuses its memory while that is in the cache.
        return combine_tiles(found), states

    def _observed_step(
        self,
        number: int,
        layout: StepLayout,
        scale: Tensor | None,
        scales: Tensor | None = None,
        largest: tuple[LargestWeights | None, LargestWeights | None] = (None, None),
        *,
        is_taken: bool = True,
    ) -> ObservedStep:
        """The data of tile `number`; `is_taken`: with the values after the step, not only those before it."""
        tile, before, after = self._tiles[number], self._before.values, self._after.values
        keys = (*layout.before.keys, GRADIENT) if self.knows_gradient else layout.before.keys
        return ObservedStep(
            before={key: before[key][tile.slots] for key in keys},
            after={key: after[key][tile.slots] for key in layout.after.keys} if is_taken else {},
            layout=layout,
            group=self._hyperparameters,
            scalars=self._scalars,
            decay=self._decay,
            intent=self.intent,
            scale=scale,
            tile=tile,
            block=self.layout.block,
            tensors=len(self.members),
            scales=None if scales is None else scales[tile.blocks],
            formats=self._formats[number] if is_taken else {},
            largest=largest,
            held=None if self._held is None else self._held[tile.slots],
            launch=self._launch,
            adjacent=self.follows != "other steps",
        )

    def _remember(self, view: StepView, tile: Tile) -> None:
        """Keep in which slots the step left a residual: the next measured step should find one there."""
        left = residuals_left(view)
        if left is not None:
            if self._held is None:
                self._held = torch.zeros(self.layout.slots, dtype=torch.uint8, device=self.layout.device)
            self._held[tile.slots] = left

    def take_over(self, other: Bucket) -> None:
        """Take over another bucket's knowledge of the residuals of the same blocks."""
        if other._held is None:
            return
        here, there = self.layout.same_blocks(self.members, other.layout, other.members)
        if len(here):
            if self._held is None:
                self._held = torch.zeros(self.layout.slots, dtype=torch.uint8, device=self.layout.device)
            places = from_host(here, self.layout.device), from_host(there, self.layout.device)
            block = self.layout.block
            self._held.view(-1, block)[places[0]] = other._held.view(-1, block)[places[1]]

    def _fp8_scales(self) -> Tensor:
        assert self._states is not None
        values = self._before.values[self._states.stored[0]]
        return fp8_scales(values, self.layout.tensor_of_block, len(self.members), self.layout.block)

    def _gradients(self) -> list[Any]:
        name = self.intent.composition.gradient
        return [getattr(parameter, name, None) for parameter in self.parameters]


def _bits(values: Tensor) -> Tensor:
    """The same memory as integers: a NaN equals itself."""
    return values.view(torch.int64)
