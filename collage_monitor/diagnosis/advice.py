"""Advice for a run that loses updates: by the rule, the dtype, the sparsity and the states of the trained weights.

Whoever advises takes it from here: terminal, notebook, page, report and audit. Advice names only strategies that
work with the trained weights and the rule, and that keep no part less exactly than now.

Each advice is followed and measured (`tests/agent/watching/test_advice.py`, `test_all_advice.py`; that on averages:
`test_average_watch.py`). `judge` calls `advice_of`, the audit `advice_for`, `recommendation.py` `most_exact`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from msgspec.structs import replace

from collage_monitor.diagnosis.remedies import remedy
from collage_monitor.diagnosis.words import MADE_BY_THE_STEP
from collage_monitor.metrics import STATE_RATIOS, split_key
from collage_monitor.strategies import more_exact, recommend
from collage_monitor.wire import Advice, Choice, Door, Finding, Trained, WatchInfo

__all__ = ["Lacking", "advice_for", "advice_of", "most_exact"]

Lacking = Literal["weights", "states"]
_LACKING: Final[dict[str, Lacking]] = {
    "losing updates": "weights",
    "decay is lost": "weights",
    "states are stuck": "states",
}
"""By the words of `words.py`; a health that is missing here gets no advice."""
_NARROW: Final = ("bfloat16", "float16")
_DENSE: Final = 'model.apply(lambda module: setattr(module, "sparse", False))'
_BEFORE: Final[dict[Door, str]] = {
    "torch": "before the scheduler is built",
    "transformers": "before trainer.train()",
    "lightning": "in configure_optimizers, before the scheduler is built",
    "accelerate": "before accelerator.prepare, and before the scheduler is built",
}
"""Where the line that makes another optimizer stands, by the framework that runs the loop."""
_ITS_WEIGHTS: Final = (
    '[setattr(own, "data", own.float()) for group in optimizer.param_groups for own in group["params"]]'
)
_RELEASED: Final = "; remove the hooks that step the old one in backward(), then optimizer.step() steps this one"
_AVERAGE: Final = Advice(
    "average of the weights",
    "keep the average in float32, as AveragedModel(model, avg_fn=get_ema_avg_fn(decay)).float() does, or round it "
    "stochastically",
)
_NOT_FINITE: Final = Advice(
    "the run", "stop it, and resume from a checkpoint before this step with a lower learning rate or with clipping"
)
_NOT_FINITE_OF_FINITE: Final = Advice(
    "the run",
    "stop it, and resume from a checkpoint before this step with a larger eps, a lower learning rate, or weights "
    "in float32 under torch.autocast",
)
_OF_WHAT_IS_NOT_FINITE: Final = {
    "state_infinite_ratio": Advice(
        "the optimizer",
        "give it gradients without a loss scale, as scaler.unscale_(optimizer) does, and build it again on weights "
        "in float32 under torch.autocast: what is infinite stays so",
    ),
}
"""By the metric of the finding."""


def advice_of(findings: Sequence[Finding], watch: WatchInfo | None) -> list[Advice]:
    """What to try against the findings, the deciding one first; an entry for each optimizer that can do better, and
    for an average of the weights that loses its updates. For a training that learns nothing the line to paste."""
    lacking = _LACKING.get(findings[0].health) if findings else None
    told = remedy(findings[0], watch.door if watch else "torch") if findings else None
    if told is not None:
        return [told]
    if findings and findings[0].health == "not finite":
        of_others = _NOT_FINITE_OF_FINITE if MADE_BY_THE_STEP in findings[0].text else _NOT_FINITE
        return [_OF_WHAT_IS_NOT_FINITE.get(findings[0].key.partition("/")[0], of_others)]
    average = [_AVERAGE for finding in findings if finding.key == "average_lost_ratio"]
    if lacking is None or watch is None:
        return average
    stuck = [name for finding in findings for metric, name in [split_key(finding.key)] if metric in STATE_RATIOS]
    kept = watch.fingerprint.states if watch.fingerprint else {}
    wide = bool(stuck) and all(kept.get(name or "") == "float32" for name in stuck)
    trained = _alike_together(watch.trained)
    alone, door = len(trained) == 1, watch.door
    each = [advice_for(entry, lacking, wide_states=wide, alone=alone, door=door) for entry in trained]
    each = _of_one_dtype(trained, each)
    named = any(entry.choices for entry in each if entry is not None)
    return [*(entry for entry in each if entry is not None and (entry.choices or not named)), *average]


def _alike_together(trained: Sequence[Trained]) -> list[Trained]:
    """Optimizers that differ only in how many parameters they train, as one of each: one line is for all."""
    alike: dict[str, list[Trained]] = {}
    for entry in trained:
        dtypes = dict.fromkeys(sorted(entry.parameters), 0)
        kind = replace(entry, parameters=dtypes, sparse=min(entry.sparse, 1), float32_bytes=None)
        alike.setdefault(repr(kind), []).append(entry)
    return [
        replace(
            members[0],
            parameters={key: sum(own.parameters[key] for own in members) for key in members[0].parameters},
            sparse=sum(own.sparse for own in members),
            float32_bytes=_mean_bytes(members),
        )
        for members in alike.values()
    ]


def _mean_bytes(members: Sequence[Trained]) -> float | None:
    known = [(own.float32_bytes, sum(own.parameters.values())) for own in members]
    whole = sum(elements for _, elements in known)
    if not whole or any(size is None for size, _ in known):
        return None
    return sum((size or 0.0) * elements for size, elements in known) / whole


def advice_for(
    trained: Trained,
    lacking: Lacking,
    *,
    wide_states: bool = False,
    alone: bool = True,
    door: Door = "torch",
) -> Advice | None:
    """What to try for one optimizer that keeps too little of its weights or states; None where nothing keeps more.

    wide_states: the states that are lacking are in fp32 already. alone: no other optimizer trains the model. door:
    the framework that runs the loop, in whose words the lines are; a sharded model's are torch's.
    """
    if trained.sharded:
        door = "torch"
    narrow = [dtype for dtype in trained.parameters if dtype in _NARROW]
    if lacking == "states" and wide_states:
        return None
    if not narrow:
        return _for_fp32_weights(trained, lacking, door)
    if _unfit(trained):
        return _to_fp32_weights(trained, narrow, alone=alone)
    named = more_exact(
        trained.strategy,
        lacking,
        betas=trained.betas,
        float16="float16" in narrow,
        first_moments=trained.first_moments,
        second_moments=trained.second_moments,
        sharded=trained.sharded,
    )
    if not named:
        return None
    choices = [
        Choice(_code(trained, entry.name, door), _bytes(trained, entry.bytes_of(*_moments(trained))), entry.name)
        for entry in named
    ]
    first, *others = choices
    words = [f"try {_one_line(first.code)} ({_size(first)})"]
    words += [f'"{other.strategy}" ({other.bytes_per_parameter:.3g})' for other in others]
    text = f"{' or '.join(words)}, {_BEFORE[door]}{_RELEASED * trained.in_backward}"
    return Advice(trained.optimizer, text, choices)


def _unfit(trained: Trained) -> bool:
    """Whether no strategy here is for the optimizer, or for its gradients."""
    return trained.fitting is None or 0 < trained.sparse == sum(trained.parameters.values())


def most_exact(trained: Trained, bytes_per_parameter: float) -> Choice | None:
    """The most exact strategy in no more bytes; None if no strategy fits the optimizer or the dtype."""
    if trained.fitting is None or trained.sparse or set(trained.parameters) != {"bfloat16"}:
        return None
    first, second = _moments(trained)
    found = recommend(
        bytes_per_parameter, trained.betas, first_moments=first, second_moments=second, sharded=trained.sharded
    )
    return None if found is None else Choice(_code(trained, found.name), found.bytes_of(first, second), found.name)


def _moments(trained: Trained) -> tuple[int, int]:
    return trained.first_moments, trained.second_moments


def _code(trained: Trained, strategy: str, door: Door = "torch") -> str:
    lines = ["import collage_agent.optim"]
    lines += [_DENSE] if trained.sparse else []
    name = "optimizer"
    if door == "transformers":
        lines, name = [*lines, "trainer.create_optimizer()"], "trainer.optimizer"
    fitting = f"collage_agent.optim.{trained.fitting}"
    return "\n".join([*lines, f'{name} = {fitting}.from_optimizer({name}, strategy="{strategy}")'])


def _one_line(code: str) -> str:
    """The code as quoted in a sentence, without its imports."""
    return "; ".join(line for line in code.splitlines() if not line.startswith(("import ", "from ")))


def _size(choice: Choice) -> str:
    size = choice.bytes_per_parameter
    return "its bytes are not known" if size is None else f"{size:.3g} bytes a parameter"


def _bytes(trained: Trained, narrow: float | None) -> float | None:
    """Bytes over all weights; weights that are not in 16 bits stay as they are."""
    if narrow is None:
        return None
    elements = sum(trained.parameters.values())
    wide = sum(count for dtype, count in trained.parameters.items() if dtype not in _NARROW)
    return (narrow * (elements - wide) + (8 + 4 * sum(_moments(trained))) * wide) / elements


def _for_fp32_weights(trained: Trained, lacking: Lacking, door: Door) -> Advice | None:
    """Nothing here keeps more than an fp32 weight; narrower states beside it can be as wide."""
    if set(trained.parameters) != {"float32"}:
        return None
    if lacking == "weights":
        text = "no strategy keeps more than fp32 weights do: such updates are below what fp32 can hold"
        return Advice(trained.optimizer, text)
    if trained.fitting is None:
        return Advice(trained.optimizer, "keep the states in float32, as the weights are")
    choice = Choice(_code(trained, "plain", door), 8.0 + 4 * sum(_moments(trained)), "plain")
    text = f"keep the states in float32, as the weights are: {_one_line(choice.code)} ({_size(choice)})"
    return Advice(trained.optimizer, text + _RELEASED * trained.in_backward, [choice])


def _to_fp32_weights(trained: Trained, narrow: Sequence[str], *, alone: bool) -> Advice | None:
    """fp32 weights keep what any rule makes of them, under autocast at the speed of 16 bits.

    Beside another optimizer only its own weights: that one's stay as it needs them.
    """
    if trained.strategy == "master-weights":
        return None
    dtype, before = f"torch.{narrow[0]}", "before the optimizer is built"
    if trained.sharded:
        made = f"fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype={dtype}))"
        lines = ["import torch", "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"]
        lines += ["model.float()", made]
        before = "before the model is sharded"
    else:
        cast = f'torch.autocast("{trained.device}", dtype={dtype})'
        wide = "model.float()" if alone else _ITS_WEIGHTS
        before = before if alone else "before its first step"
        lines = ["import torch", wide, f"model.forward = {cast}(model.forward)"]
    choice = Choice("\n".join(lines), trained.float32_bytes)
    why = "its gradients are sparse" if trained.sparse else f"no strategy here is for this {trained.optimizer}"
    text = f"{why}: try fp32 weights, {before}: {_one_line(choice.code)} ({_size(choice)})"
    return Advice(trained.optimizer, text, [choice])


def _of_one_dtype(trained: Sequence[Trained], told: list[Advice | None]) -> list[Advice | None]:
    """The advice, where a sharded model's weights become fp32 for one optimizer: with them those of all others."""
    pairs = list(zip(trained, told, strict=True))
    whole = next((own for entry, own in pairs if own and own.choices and entry.sharded and _unfit(entry)), None)
    if whole is None:
        return told
    return [
        own if _unfit(entry) or not {*entry.parameters} & {*_NARROW} else _to_fp32_with_others(entry, whole)
        for entry, own in pairs
    ]


def _to_fp32_with_others(trained: Trained, whole: Advice) -> Advice:
    choice = Choice(whole.choices[0].code, 8.0 + 4 * sum(_moments(trained)))
    text = f"its weights become fp32 with those of {whole.optimizer}"
    if trained.optimizer == trained.fitting and trained.strategy != "plain":
        text += ': build it with strategy="plain"'
    return Advice(trained.optimizer, f"{text} ({_size(choice)})", [choice])
