"""One measured step: gather before it, and after it turn u and e of every layer into estimated totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.buckets.bucket import Bucket, Followed
from collage_agent.buckets.checksum import CHECKSUM_STATISTICS, Checksums
from collage_agent.buckets.planned import Planned
from collage_agent.buckets.totals import (
    BASE_STATISTICS,
    ORACLE_STATISTICS,
    SampleSizes,
    bucket_totals,
    oracle_totals,
)
from collage_agent.intent.before_after import BeforeAfter
from collage_agent.intent.choose import Intent
from collage_agent.intent.clone import clone_value
from collage_agent.intent.oracle import Oracle
from collage_agent.measure.footprint import kept_bytes
from collage_agent.measure.rotation import ELEMENTS_A_STEP, Rotation
from collage_agent.sample import stored
from collage_agent.sample.gather import BlockLayout, Staging, local
from collage_agent.sample.quantised import reading
from collage_agent.sample.sampling import TensorSample, draw
from collage_agent.stats import COUNTERFACTUAL_SUMS, on_host
from collage_agent.training.parameters import WatchedParameter
from collage_agent.training.scaling import loss_scaling
from collage_agent.training.shards import placed_alike
from collage_agent.windows import Windows

__all__ = ["Meter"]

ORACLE_SAMPLE: Final = 1024
WINDOW_SAMPLE: Final = 2048
_Entry = tuple[int, int, int, float, torch.dtype | None]
_Signature = tuple[bool, int, tuple[_Entry, ...]]
_NO_STATE: Final[dict[str, Any]] = {}
_CLOSURE: Final = BeforeAfter("the step evaluates a closure repeatedly, so no one gradient leads to it")


class Meter:
    """Measures steps of one optimizer, and keeps its oracle running.

    Calls come in pairs around a step: `before`, `after`. `statistics` are the rows, `watched` the columns of what
    `after` returns; both are only ever appended to. `rarer` holds keys that the last measured step reported and not
    every one does. Tensors stepped alike are measured as one bucket; when gradients come or go, or states appear,
    the buckets are planned anew.
    """

    def __init__(
        self,
        watched: Sequence[WatchedParameter],
        intents: Sequence[Intent],
        sample: int | Literal["all"],
        *,
        oracle: bool,
        windows: Windows | None = None,
        seed: int,
        shard: int = 0,
    ) -> None:
        self.watched = list(watched)
        self.statistics = list(BASE_STATISTICS)
        self.rarer: list[tuple[str, ...]] = []
        self._intents = list(intents)
        self._sample: int | Literal["all"] = sample
        self._wants_oracle = oracle
        self.windows = windows
        self._seed, self._shard = seed, shard
        self._oracles: list[Oracle] | None = None
        self._versions: list[int] = []
        self._left_behind: list[Followed] = []
        self.oracle_restarts = 0
        self._signature: _Signature | None = None
        self._plan: list[Planned] = []
        self._row_index: dict[tuple[str, ...], Tensor] = {}
        self._rows: dict[str, int] = {key: row for row, key in enumerate(self.statistics)}
        self._rotation = Rotation(None if sample == "all" else ELEMENTS_A_STEP)
        self._kept_bytes: tuple[tuple[object, ...] | None, float] = (None, 0.0)

    @property
    def sample(self) -> int | Literal["all"]:
        """Elements looked at in each tensor, at most."""
        return self._sample

    def kept_bytes(self, optimizer: Optimizer) -> float:
        """Bytes of the buffers kept for this optimizer; counted anew when the buckets were planned anew."""
        counted_for, found = self._kept_bytes
        plans = (self._plan, self._rotation.kept, None if self.windows is None else self.windows.plan)
        if counted_for is None or any(then is not now for then, now in zip(counted_for, plans, strict=True)):
            parameters = [watched.parameter for watched in self.watched]
            states = [value for state in optimizer.state.values() for value in state.values()]
            gradients = [parameter.grad for parameter in parameters]
            training = [tensor for tensor in (*parameters, *gradients, *states) if isinstance(tensor, Tensor)]
            found = float(kept_bytes((self._plan, self._oracles, self.windows, self._rotation), training))
            self._kept_bytes = plans, found
        return found

    def shrink_sample(self, sample: int) -> None:
        """Look at a smaller sample, a prefix of the present one, from the next measured step on."""
        self._sample, self._signature = sample, None

    def extend(self, watched: Sequence[WatchedParameter], intents: Sequence[Intent]) -> None:
        """Watch further parameters too; `intents` is the whole list, one a parameter group."""
        self.watched += watched
        self._intents = list(intents)
        self._signature = None

    def restart_oracle(self) -> None:
        """Let the oracle attach anew before the next step: the live weights and states were replaced."""
        self._oracles = None
        self._signature = None

    def broken_off(self) -> None:
        """The live step raised: what the oracle and the windows took for taken was not, or in part."""
        if self._oracles is not None:
            self.restart_oracle()
            self.oracle_restarts += 1
        if self.windows is not None:
            self.windows.drop()

    def follow(self, optimizer: Optimizer) -> None:
        """Let the oracle take the step that the optimizer is about to take. Inside `isolated`."""
        if not self._wants_oracle:
            return
        if self._written_since() or self._moved_since(optimizer):
            self.restart_oracle()
            self.oracle_restarts += 1
        if self._oracles is None:
            self._oracles = self._attach_oracles(optimizer)
        scale, skipped = loss_scaling(optimizer)
        for oracle in self._in_lock_step():
            watched = self.watched[oracle.members[0]]
            intent = self._intents[watched.group]
            intent.refresh(optimizer)
            gradients = [_gradient(self.watched[member]) for member in oracle.members]
            oracle.step(intent, optimizer.param_groups[watched.group], gradients, scale, skipped)

    def add_up(self, optimizer: Optimizer, step: int, doublings: int) -> None:
        """Let the windows add u of step number `step`, which the optimizer is about to take. Inside `isolated`."""
        if self.windows is None:
            return
        if self.windows.running and self._written_since():
            self.windows.drop()
        signature = self._signature_of(optimizer, closure=False)
        cap = self._sample if self._sample == "all" else min(self._sample, WINDOW_SAMPLE)

        def plan() -> list[Planned]:
            planned = self._planned(optimizer, signature, cap, ())
            return [entry for entry in planned if entry.bucket.intent.kind != "before-after"]

        self.windows.before(optimizer, step, doublings, (cap, signature[2]), plan)

    def stepped(self) -> None:
        """The live step is over: whoever writes to the weights from here on is not the optimizer. O(1) a tensor."""
        if self._wants_oracle or (self.windows is not None and self.windows.running):
            self._versions = [watched.parameter._version for watched in self.watched]

    def before(self, optimizer: Optimizer, *, closure: bool) -> None:
        """Gather what the step is about to change. Inside `isolated`."""
        signature = self._signature_of(optimizer, closure)
        if signature != self._signature:
            self._oracles = self._stepped_alike(optimizer)
            signature = self._signature_of(optimizer, closure)
            self._plan = self._planned(optimizer, signature, self._sample, self._oracles or ())
            self._signature = signature
        for planned in self._plan:
            planned.gather_before(optimizer)
        if not closure:
            self._rotation.before(optimizer, self.watched, self._intents, lambda index: self._draw(index, "all"))

    def after(self, optimizer: Optimizer, *, counterfactuals: bool = False) -> Tensor:
        """Estimated totals of the step, fp64 [statistics][watched], NaN: not reported. Inside `isolated`.

        `counterfactuals` asks for what other ways of keeping the weights would have kept.
        """
        scale, skipped = loss_scaling(optimizer)
        found: list[tuple[tuple[str, ...], Tensor, Tensor]] = []
        for planned in self._plan:
            followed = [follower for follower, _, _ in planned.followed]
            states = planned.states(optimizer)
            blocks = planned.bucket.measure(states, scale, followed, counterfactuals=counterfactuals)
            keys, totals = bucket_totals(planned.bucket, planned.sizes, blocks)
            if planned.apart is not None:
                totals = torch.where(planned.apart, torch.nan, totals)
            found.append((keys, totals, planned.columns))
            if planned.checksums is not None:
                found.append((CHECKSUM_STATISTICS, planned.checksums.rows(planned.bucket), planned.columns))
            for follower, sizes, columns in planned.followed:
                found.append((ORACLE_STATISTICS, oracle_totals(follower, sizes), columns))
        self._left_behind = [follower for planned in self._plan for follower, _, _ in planned.followed]
        found += self._rotation.after(optimizer, scale, skipped)
        self.rarer = [COUNTERFACTUAL_SUMS] if any(COUNTERFACTUAL_SUMS[0] in keys for keys, _, _ in found) else []
        if self.windows is not None:
            ended = self.windows.after(optimizer)
            self.rarer += [keys for keys, _, _ in ended]
            found += ended
        return self._assembled(found, skipped)

    def _written_since(self) -> bool:
        """Whether somebody wrote to a weight since the last step; torch counts the writes on the host."""
        return any(
            watched.parameter._version != version
            for watched, version in zip(self.watched, self._versions, strict=False)
        )

    def _moved_since(self, optimizer: Optimizer) -> bool:
        """Whether followed weights are not those that the last step left, if it was measured.

        So a write that torch does not count, through `.data`, is noticed too; on the host only, where comparing
        waits for nothing.
        """
        followers, self._left_behind = self._left_behind, []
        current = {id(oracle) for oracle in self._oracles or ()}
        for follower in followers:
            oracle = follower.oracle
            if id(oracle) in current and on_host(follower.rows):
                weights = self._attached_state(optimizer, oracle.members, oracle.layout, averages=False)
                if follower.differs(weights[stored.PARAMETER]):
                    return True
        return False

    def _assembled(self, found: list[tuple[tuple[str, ...], Tensor, Tensor]], skipped: Tensor | None) -> Tensor:
        for keys, _, _ in found:
            for key in keys:
                if key not in self._rows:
                    self._rows[key] = len(self.statistics)
                    self.statistics.append(key)
        device = found[0][1].device if found else torch.device("cpu")
        shape = (len(self.statistics), len(self.watched))
        totals = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        for keys, values, columns in found:
            rows = self._row_index.get(keys)
            if rows is None:
                rows = torch.tensor([self._rows[key] for key in keys]).unsqueeze(1).to(device)
                self._row_index[keys] = rows
            totals[rows, columns.to(device).unsqueeze(0)] = values.to(device)
        if skipped is not None:
            totals = torch.where(skipped.to(device).reshape(()).ne(0), torch.nan, totals)
        return totals

    def _signature_of(self, optimizer: Optimizer, closure: bool) -> _Signature:
        """What decides which tensors are stepped alike; steps are counted from the first tensor's."""
        entries: list[_Entry] = []
        first: float | None = None
        state_of = optimizer.state.get
        for index, watched in enumerate(self.watched):
            parameter = watched.parameter
            gradient = parameter.grad
            if (gradient is None and not closure) or not watched.shard.elements:
                continue
            own = state_of(parameter, _NO_STATE)
            step = _step_count(own)
            if first is None:
                first = step
            dtype = None if gradient is None else gradient.dtype
            entries.append((index, watched.group, len(own), step - first, dtype))
        return closure, 0 if self._oracles is None else len(self._oracles), tuple(entries)

    def _planned(
        self, optimizer: Optimizer, signature: _Signature, cap: int | Literal["all"], oracles: Sequence[Oracle]
    ) -> list[Planned]:
        kinds: dict[object, list[int]] = {}
        closure, _, entries = signature
        for index, *rest in entries:
            parameter = self.watched[index].parameter
            gradient = parameter.grad
            if gradient is not None and (gradient.is_sparse or not placed_alike(parameter, gradient)):
                continue
            shapes = stored.elementwise_dtypes(parameter, optimizer.state.get(parameter, {}))
            kinds.setdefault((*rest, local(parameter).device, parameter.dtype, shapes), []).append(index)
        return [self._plan_bucket(members, closure, cap, oracles) for members in kinds.values()]

    def _plan_bucket(
        self, members: list[int], closure: bool, cap: int | Literal["all"], oracles: Sequence[Oracle]
    ) -> Planned:
        watched = self.watched[members[0]]
        parameters = [self.watched[member].parameter for member in members]
        samples = [self._draw(member, cap) for member in members]
        intent = _CLOSURE if closure else self._intents[watched.group]
        bucket = Bucket(members, parameters, samples, intent, knows_gradient=not closure)
        device = bucket.layout.device
        followed = []
        for oracle in [] if intent.kind == "before-after" else oracles:
            if set(oracle.members) <= set(members):
                sizes = SampleSizes(oracle.samples, oracle.layout)
                columns = torch.tensor(oracle.members).to(device)
                followed.append((Followed(oracle, bucket), sizes, columns))
        checksums = None
        sizes = SampleSizes(samples, bucket.layout)
        if any(self.watched[member].shard.replicated for member in members):
            checksums = Checksums([self.watched[member] for member in members], sizes, device)
        return Planned(bucket, watched.group, sizes, torch.tensor(members).to(device), followed, checksums)

    def _draw(self, index: int, cap: int | Literal["all"]) -> TensorSample:
        watched, shard = self.watched[index], self.watched[index].shard
        return draw(
            watched.name,
            shard.elements,
            watched.parameter.element_size(),
            cap,
            seed=self._seed,
            shard=self._shard + shard.number,
            start=shard.start,
        )

    def _attach_oracles(self, optimizer: Optimizer) -> list[Oracle]:
        cap = ORACLE_SAMPLE if self._sample == "all" else min(self._sample, ORACLE_SAMPLE)
        oracles = []
        kinds: dict[object, list[int]] = {}
        for index, watched in enumerate(self.watched):
            if self._intents[watched.group].kind == "before-after" or not _followed(watched):
                continue
            own = optimizer.state.get(watched.parameter, {})
            key = (
                watched.group,
                _step_count(own),
                len(own),
                local(watched.parameter).device,
                watched.parameter.dtype,
                stored.elementwise_dtypes(watched.parameter, own),
            )
            kinds.setdefault(key, []).append(index)
        for members in kinds.values():
            parameters = [self.watched[member].parameter for member in members]
            samples = [self._draw(member, cap) for member in members]
            layout = BlockLayout(samples, parameters)
            state = self._attached_state(optimizer, members, layout)
            oracles.append(Oracle(members, samples, layout, state.pop(stored.PARAMETER), state))
        return oracles

    def _stepped_alike(self, optimizer: Optimizer) -> list[Oracle] | None:
        """The oracles, split where states that came after they attached are not kept alike, as buckets are."""
        if self._oracles is None:
            return None
        parts: list[Oracle] = []
        parameters = {index: watched.parameter for index, watched in enumerate(self.watched)}
        for oracle in self._oracles:
            kinds: dict[object, list[int]] = {}
            for member in oracle.members:
                state = optimizer.state.get(parameters[member], {})
                kind = len(state), stored.elementwise_dtypes(parameters[member], state)
                kinds.setdefault(kind, []).append(member)
            alone = len(kinds) == 1
            parts += [oracle] if alone else [oracle.split(members, parameters) for members in kinds.values()]
        return parts

    def _attached_state(
        self, optimizer: Optimizer, members: Sequence[int], layout: BlockLayout, *, averages: bool = True
    ) -> dict[str, Any]:
        """Stored weight, and averages, of the members' samples in fp64, scalars beside them."""
        kept = self._intents[self.watched[members[0]].group].kept
        parameters = [self.watched[member].parameter for member in members]
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        keys = tuple(stored.elementwise_state(parameters[0], states[0]))
        present = (stored.PARAMETER, *keys)

        def gathered(names: list[str]) -> Tensor:
            total: Tensor | None = None
            for name in names:
                tensors = parameters if name == stored.PARAMETER else [reading(state, name) for state in states]
                staging = Staging(layout, tensors[0].dtype)
                layout.gather(tensors, staging)
                if not tensors[0].is_floating_point():
                    return staging.values
                sign = kept.sign if name == kept.residual else 1
                total = staging.values.double() * sign if total is None else total.add_(staging.values, alpha=sign)
            assert total is not None
            return total

        state: dict[str, Any] = clone_value(stored.scalar_state(parameters[0], states[0]))
        for name in stored.average_names(keys, kept) if averages else ():
            state[name] = gathered(stored.components(name, keys, kept))
        state[stored.PARAMETER] = gathered(stored.stored_parameter(present, kept))
        return state

    def _in_lock_step(self) -> list[Oracle]:
        """The oracles whose tensors all have a gradient now; one that lost part of its tensors is split first."""
        assert self._oracles is not None
        parameters = {index: watched.parameter for index, watched in enumerate(self.watched)}
        stepping: list[Oracle] = []
        everyone: list[Oracle] = []
        for oracle in self._oracles:
            present = [member for member in oracle.members if parameters[member].grad is not None]
            if 0 < len(present) < len(oracle.members):
                absent = [member for member in oracle.members if member not in present]
                parts = [oracle.split(present, parameters), oracle.split(absent, parameters)]
            else:
                parts = [oracle]
            everyone += parts
            stepping += parts[:1] if present else []
        self._oracles = everyone
        return stepping


def _followed(watched: WatchedParameter) -> bool:
    gradient = watched.parameter.grad
    return gradient is not None and watched.shard.elements > 0 and placed_alike(watched.parameter, gradient)


def _gradient(watched: WatchedParameter) -> Tensor:
    gradient = watched.parameter.grad
    assert gradient is not None
    return gradient


def _step_count(state: dict[str, Any]) -> float:
    step = state.get("step", 0.0)
    if isinstance(step, Tensor):
        return step.item() if step.is_cpu else 0.0
    return float(step)
