"""Messages from the agent to the server, and those of a sign-in.

A field has the same name in msgpack, in JSON and in the database. Every message of the agent may be sent
twice: run, launch and stream carry ids made by the client, a report its number in the stream.

The server checks each against its bounds and `LIMITS`. A field may be added with a default, none renamed: agents of
other versions send these, and spools hold them (`tests/server/test_bodies.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

__all__ = [
    "Attempt",
    "AttemptCreate",
    "Breach",
    "Compared",
    "Continuation",
    "Conversion",
    "Coverage",
    "DECAYS_APART",
    "Fingerprint",
    "Index",
    "LIMITS",
    "Layer",
    "LossKind",
    "Name",
    "Report",
    "ReportBatch",
    "ReportGap",
    "ReportsOfStep",
    "ResumeLoss",
    "RunCreate",
    "RunUpdate",
    "SignInFinish",
    "SignInOffer",
    "SignInRequest",
    "SignedOut",
    "Stream",
    "StreamCreate",
    "Trained",
    "WatchInfo",
]

LIMITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "body_bytes": 16 * 2**20,
        "reports_per_batch": 5_000,
        "layers_per_run": 100_000,
        "statistics_per_stream": 2_000,
        "scalars_per_report": 200,
        "scalar_names_per_stream": 10_000,
        "events_per_run": 100_000,
        "name_characters": 512,
        "tags_per_run": 64,
        "config_bytes": 2**20,
    }
)
"""What one message may hold. The server answers more with 413 or 422 and names the limit."""

_Identifier = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*(?![\s\S])")]
"""The end is written as JSON Schema and Python both read it: Python's `$` also matches before a last line break."""
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Role = Annotated[
    str,
    Meta(
        pattern=r"^(?!trainer(?![\s\S]))[a-z][a-z0-9-]{0,23}(?![\s\S])",
        description="1 to 24 lowercase letters, digits or '-', the first a letter; not 'trainer'",
    ),
]
Text = Annotated[str, Meta(max_length=65_536)]
Index = Annotated[int, Meta(ge=0, le=2**53)]
ReportsOfStep = Annotated[int, Meta(ge=1, le=100_000)]


class RunCreate(Struct, kw_only=True, frozen=True):
    """Create a run, or resume it: one that is over goes on with its next attempt. The route names the project."""

    run_id: _Identifier
    name: Name | None = None
    group: Name | None = None
    tags: Annotated[list[Name], Meta(max_length=64)] = field(default_factory=list)
    notes: Text = ""
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    resume: Literal["allow", "must", "never"] = "allow"


class SignInOffer(Struct, kw_only=True, frozen=True):
    """Where people may sign in: the provider's host; None where tokens are the only way."""

    provider: str | None


class SignInRequest(Struct, kw_only=True, frozen=True):
    """The address for the browser; the dashboard keeps the other three fields until the browser is back."""

    authorization_url: str
    state: str
    nonce: str
    code_verifier: str


class SignInFinish(Struct, kw_only=True, frozen=True):
    """The provider's answer that the browser brought back, with the fields that the dashboard kept for this
    sign-in."""

    code: Annotated[str, Meta(min_length=1, max_length=4_096)]
    code_verifier: Annotated[str, Meta(min_length=43, max_length=128)]
    nonce: Annotated[str, Meta(min_length=16, max_length=128)]


class SignedOut(Struct, kw_only=True, frozen=True):
    """A session that has ended; at `log_out_url` the provider's own ends, too, if it has such a page."""

    log_out_url: str | None


class RunUpdate(Struct, kw_only=True, frozen=True):
    """Change a run; a field that is None stays as it is.

    configuration: that of the runs among whose seeds this one counts, from their rows; "": its own again.
    """

    state: Literal["running", "finished", "failed"] | None = None
    name: Name | None = None
    group: Name | None = None
    tags: Annotated[list[Name], Meta(max_length=64)] | None = None
    notes: Text | None = None
    configuration: Annotated[str, Meta(max_length=32)] | None = None


class AttemptCreate(Struct, kw_only=True, frozen=True):
    """Register a launch of the job, at the first step that it takes or logs.

    The same `launch_id` is the same attempt. With a `role`, such as "evaluator", it is a launch of a second writer:
    it logs to the run and measures nothing, and its names begin with ROLE and a slash. The run's attempts, newest
    step, state and last sign of life are only those of the training.
    """

    launch_id: _Identifier
    first_step: Index
    role: Role | None = None


class Attempt(Struct, kw_only=True, frozen=True):
    """An attempt in the server's order: `attempt` counts from 1 within the run, second writers' from -1 downwards.

    From `measured_from` on it hides all reports of older attempts; None: it measures nothing, or not yet. Its
    values under a name hide that name's older points from its first one on. A second writer's hides nothing and
    is not hidden: of several values at one step the newest launch's counts.
    """

    run_id: str
    attempt: int
    launch_id: str
    first_step: int
    created_at: float
    measured_from: int | None = None


class Layer(Struct, kw_only=True, frozen=True):
    """A parameter tensor's shard on one rank: `elements` of the shard, `shape` of the whole tensor."""

    name: Name
    shape: list[Index]
    dtype: Name
    elements: Index
    module_type: Annotated[str, Meta(max_length=512)] = ""
    replica: Index = 0


DECAYS_APART = "decay apart"
"""An implementation of a step whose weight decay is an operation of its own, rounded to the weight's dtype."""


class Fingerprint(Struct, kw_only=True, frozen=True):
    """How weights, gradients and states are really kept, as observed by the agent.

    `parameters` and `gradients` map dtype to number of elements; `states` maps key to dtype, or to how it is
    quantised; `factored` those kept by row or column, whose decay no number follows. `master` is the state that
    holds the stored weight; `residual` the state that completes the weight, added with `residual_sign`.
    `stochastic_rounding`: whether weights are rounded at random, seen at attach; None if unknown, or if layers
    differ: then `layer_rounds_at_random` has it for each known layer. `implementation` is "fused", "foreach",
    "for-loop", "decay apart" (seen in an optimizer of another make) or "unknown", several optimizers' with " and "
    between. `findings` lists, one sentence each, the differences from what was declared. `unexplained` names a
    state that keeps something of the weights in a way that is not understood, and what it did: where it is set, no
    number can make a run healthy or sick.
    """

    parameters: dict[Name, Index] = field(default_factory=dict)
    gradients: dict[Name, Index] = field(default_factory=dict)
    states: dict[Name, Name] = field(default_factory=dict)
    factored: dict[Name, Name] = field(default_factory=dict)
    master: Name | None = None
    residual: Name | None = None
    residual_sign: Literal[1, -1] = 1
    stochastic_rounding: bool | None = None
    layer_rounds_at_random: dict[Name, bool] = field(default_factory=dict)
    implementation: Name = "unknown"
    findings: list[Text] = field(default_factory=list)
    unexplained: Text | None = None


class Conversion(Struct, kw_only=True, frozen=True):
    """Weights were converted after `step`, from a strategy without residuals or masters to one with them."""

    source: Name
    target: Name
    step: Index

    def __str__(self) -> str:
        masters = self.target == "master-weights"
        beside = "master weights began as copies of them" if masters else "residuals began empty"
        return (
            f"weights were converted from {self.source} to {self.target} after step {self.step:,}, "
            f"where their {beside}"
        )


class Breach(Struct, kw_only=True, frozen=True):
    """An expectation that does not hold: which one, what was seen, as a sentence, and at which step."""

    expectation: Name
    text: Text
    step: Index

    def __str__(self) -> str:
        return f"{self.text}, at step {self.step:,}"


Door = Literal["torch", "transformers", "lightning", "accelerate"]
LossKind = Literal["masters", "residuals", "averages", "count", "counter"]


class ResumeLoss(Struct, kw_only=True, frozen=True):
    """What an optimizer lost by the first step of a launch, or when states were loaded.

    `masters`, `residuals`, `averages`: hold nothing any more, or what does not fit. `count`: of steps begins again.
    `counter`: cannot hold its count. `lasting`: the loss continues; otherwise it happened once. `short`: the text
    in a few words.
    """

    kind: LossKind
    text: Text
    step: Index
    lasting: bool = False
    short: Text = ""


class Compared(Struct, kw_only=True, frozen=True):
    """Tensors that were compared, how many differ, and the first few layers in which one does."""

    tensors: Index = 0
    differing: Index = 0
    layers: list[Name] = field(default_factory=list)

    def in_words(self, what: str) -> str:
        """ "2 of 8 weights (a, b)", or "8 weights"."""
        if not self.differing:
            return f"{self.tensors:,} {what}"
        named = f" ({', '.join(self.layers)}{', …' if self.differing > len(self.layers) else ''})"
        return f"{self.differing:,} of {self.tensors:,} {what}{named}"


class Continuation(Struct, kw_only=True, frozen=True):
    """How the values at a launch's start differ from those saved after `step`, by checksums of samples.

    `missing` are those of the `states` that are not there; `cast` counts the weights and states that are 16-bit
    numbers now, and were not. `distance` is ‖now − saved‖ / ‖saved‖ of the tensor that is farthest off, and
    `farthest` its name.
    """

    step: Index
    weights: Compared
    states: Compared
    distance: float = 0.0
    farthest: Text = ""
    missing: Compared = Compared()
    cast: Compared = Compared()

    def __str__(self) -> str:
        both = (self.weights, "weights"), (self.states, "states")
        other = [compared.in_words(what) for compared, what in both if compared.differing]
        if not other:
            kept = " and ".join(compared.in_words(what) for compared, what in both if compared.tensors)
            return f"this launch goes on bit for bit from step {self.step:,}: {kept}, as they were saved"
        text = f"{' and '.join(other)} are not what was saved at step {self.step:,}"
        text += f"; {self.missing.differing:,} states are missing" if self.missing.differing else ""
        text += f"; {self.cast.differing:,} tensors were rounded to 16 bits" if self.cast.differing else ""
        far = f"; farthest is {self.farthest}, by {self.distance:.2g} of its norm" if self.distance else ""
        return text + far


class Coverage(Struct, kw_only=True, frozen=True):
    """The model's weights beside the watched ones that got gradients in the first measured step.

    `watched`, `elsewhere` and `orphaned` are numbers of elements: in the optimizers of this watch, in optimizers
    that nobody watches, and in no optimizer. `orphans` names the first of the last. `strangers` holds the shapes of
    tensors of the optimizers that are in no module and had no gradient.
    """

    watched: Index = 0
    elsewhere: Index = 0
    orphaned: Index = 0
    orphans: list[Name] = field(default_factory=list)
    strangers: list[Name] = field(default_factory=list)


class Trained(Struct, kw_only=True, frozen=True):
    """The facts about one optimizer's parameters that advice needs.

    `strategy` is the observed one. `fitting` is the class of `collage_agent.optim` that was seen to take the
    same steps; None: none here does, or it is not known. `first_moments` and `second_moments` are the numbers a
    parameter that this rule averages, `betas` their decays: Adam's β₁ and β₂. `parameters` maps dtype to elements,
    `sparse` counts those with sparse gradients. `sharded`: weights are distributed tensors. `float32_bytes`: bytes
    a parameter of weights, gradients and states, were the 16-bit ones among them in float32; None before there are
    states. `device` is its type. `in_backward`: hooks on the parameters step them one by one in the backward pass.
    """

    optimizer: Name
    strategy: Name = "unknown"
    fitting: Name | None = None
    first_moments: Index = 0
    second_moments: Index = 0
    betas: list[float] = field(default_factory=list)
    parameters: dict[Name, Index] = field(default_factory=dict)
    sparse: Index = 0
    sharded: bool = False
    float32_bytes: float | None = None
    device: Name = "cpu"
    in_backward: bool = False


class WatchInfo(Struct, kw_only=True, frozen=True):
    """What the agent watches, and how: shown with the run, not needed to read its numbers.

    `intent` says where u comes from: "shadow" (fp64 shadow step on samples), "rule" (the optimizer's update rule,
    ours or a library's, in fp64), "whole-tensor" (whole tensors in fp64, in rotation), "whole-optimizer" (a copy
    of it in fp64), or "before-after" (no u: only what changed is known); `intent_reason` says why. `conversion`
    is the last one of the weights, and `kept_since` the first measured step since weights and states are kept as
    they are now: of the watch, or after its last load of states or change of strategy or dtype. `trained` says
    what each optimizer trains. `expected` holds the expectations, as text, and `broken` those that do not hold.
    `resume_losses` lists what the launch began without, or with what does not fit, `launch_doubts` what may be
    that, or meant; `continuation` compares its start with what an earlier launch saved, and `steps_before` is the
    number of steps taken before it. `coverage` is there if other weights get gradients. `door` is the
    framework through which the watch was attached; "torch" is the training's own loop.
    """

    optimizer: Name
    strategy: Name | None = None
    observed_strategy: Name = "unknown"
    dtype: Name = "unknown"
    intent: Literal["shadow", "rule", "whole-tensor", "whole-optimizer", "before-after"] = "shadow"
    intent_reason: Text = ""
    parameters: Index = 0
    every: Index = 10
    sample: Index | Literal["all"] = 4096
    oracle: bool = False
    agent_version: Annotated[str, Meta(max_length=64)] = ""
    host: Annotated[str, Meta(max_length=255)] = ""
    fingerprint: Fingerprint | None = None
    conversion: Conversion | None = None
    kept_since: Index | None = None
    trained: list[Trained] = field(default_factory=list)
    expected: Text = ""
    broken: list[Breach] = field(default_factory=list)
    resume_losses: list[ResumeLoss] = field(default_factory=list)
    launch_doubts: list[ResumeLoss] = field(default_factory=list)
    continuation: Continuation | None = None
    steps_before: Index | None = None
    coverage: Coverage | None = None
    door: Door = "torch"

    @property
    def shown_strategy(self) -> str:
        """The label that the user gave, else what is seen."""
        return self.strategy or self.observed_strategy


class StreamCreate(Struct, kw_only=True, frozen=True):
    """Register a stream, one (attempt, rank, process), or extend it: sent again with more layers or statistics.

    Layers and statistics may only be appended; each report says how many of them it fills. A stream with statistics
    measures from the step `measured_from` on, by default the first of its attempt: from there on the attempt hides
    older ones.
    """

    stream_id: _Identifier
    launch_id: _Identifier
    rank: Index = 0
    world_size: Annotated[int, Meta(ge=1, le=2**31)] = 1
    process_id: Index = 0
    layers: list[Layer] = field(default_factory=list)
    statistics: list[Name] = field(default_factory=list)
    watch: WatchInfo | None = None
    measured_from: Index | None = None


class Stream(Struct, kw_only=True, frozen=True):
    """A stream as the server knows it. `reports` counts the stored ones, each once.

    `given_up` counts reports that the agent dropped; `missing` those below `last_seq` that have not come yet, at
    least. `lag_steps` is how far it is behind the furthest stream of the attempt. `last_report_at` is by the
    server's clock. `unknown_statistics` are those that the server's catalogue lacks: it drops their totals, in this
    stream for good. `clock_skew_seconds` is how far at most the agent's clock was ahead of the server's, taken from
    the report that arrived fastest; negative means a late clock, or slow delivery.
    """

    run_id: str
    stream_id: str
    attempt: int
    rank: int
    world_size: int
    process_id: int
    layers: int
    statistics: list[str]
    reports: int
    last_seq: int | None
    last_step: int | None
    last_report_at: float | None
    watch: WatchInfo | None = None
    given_up: int = 0
    missing: int = 0
    lag_steps: int | None = None
    clock_skew_seconds: float | None = None
    unknown_statistics: list[str] = field(default_factory=list)


class Report(Struct, kw_only=True, frozen=True):
    """The measurements and logged values of one rank at one step.

    `seq` counts from 0 within the stream. `time` is Unix time in seconds. `statistics` holds float64
    [statistic_count][layer_count], `model` float64 [statistic_count] (the rank's layers merged as shards), both
    little-endian, rows in the order that the stream declared; both None when the step was not measured. NaN is
    "not reported". The same step may be reported more than once (scalars and statistics apart, or by several
    watched optimizers): reports of one step merge. `reports_of_step` (`parts` on the wire) is how many reports with
    statistics this stream sends of the step, at least; the step is partial until that many have come (of several
    values the largest counts).
    """

    seq: Index
    step: Index
    time: float
    scalars: dict[str, float] = field(default_factory=dict)
    statistic_count: Index = 0
    layer_count: Index = 0
    statistics: bytes | None = None
    model: bytes | None = None
    reports_of_step: ReportsOfStep = field(default=1, name="parts")


class ReportGap(Struct, kw_only=True, frozen=True):
    """Reports that will never come: `first_seq` to `last_seq`, both included, were dropped for `reason`."""

    first_seq: Index
    last_seq: Index
    reason: Name


class ReportBatch(Struct, kw_only=True, frozen=True):
    """Reports of one stream, in any order, and the gaps since the last batch."""

    reports: list[Report]
    gaps: list[ReportGap] = field(default_factory=list)
