"""The compiled step: the same code through torch.compile, trusted only after a self-test.

By default the compiler keeps fp32 between two casts, so that `value - value.to(bfloat16)` folds to zero and every
low component with it. Emulated casts prevent that; the self-test proves it on this machine before the first real
step. A compiled step of `plus` takes a third to a fifth of the eager step's CPU time (`benchmarks.optimizer`).
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType

import torch

from collage_agent.optim.advance import Step, advance_in_wide
from collage_agent.optim.arithmetic import Scalar, State, WideArithmetic, Workspace
from collage_agent.optim.rules import Moment, UpdateRule
from collage_agent.optim.stepping import Member, component_names, step_tensors, wide_dtype
from collage_agent.optim.strategies import LOW_COMPONENT_SUFFIX, PARAMETER_LOW, StateStorage, StorageStrategy

__all__ = [
    "COMPILED_FORMS",
    "Structure",
    "check_compiled",
    "compiled_step",
    "scalar_tensors",
]

COMPILED_FORMS = ("fast", "bit-identical")
"""`bit-identical` gives the eager step's bits; `fast` takes the compiler's square root, whatever it is: where its
last bit differs, an update moves by at most 2**-22 of itself."""

_TESTED_ELEMENTS = 65_539
Options = dict[str, str | int | bool | Callable[..., object]]
_OPTIONS: Options = {"emulate_precision_casts": True}
_FAST_TOLERANCE = 2.0**-15

Advance = Callable[[State, Mapping[str, Scalar]], None]


@dataclass(frozen=True)
class Structure:
    """What decides the compiled code: everything but sizes and hyper-parameters' values."""

    rule: UpdateRule
    strategy: StorageStrategy
    moments: tuple[Moment, ...]
    maximize: bool
    form: str
    dtype: torch.dtype
    device_type: str
    scalar_names: tuple[str, ...]


def check_compiled(form: str | None, arithmetic: str, strategy: StorageStrategy) -> None:
    """Raise ValueError for a compiled step that does not exist."""
    if form is None:
        return
    if form not in COMPILED_FORMS:
        raise ValueError(f"Invalid compiled: {form!r}; use one of {', '.join(COMPILED_FORMS)}, or None for eager")
    if arithmetic != "fp32":
        raise ValueError(f"compiled={form!r} is for arithmetic 'fp32'; leave it out with {arithmetic!r}")
    if strategy.stochastic:
        raise ValueError(f"compiled={form!r} has no stochastic rounding; leave it out with {strategy.name!r}")


def scalar_tensors(scalars: Mapping[str, Scalar], dtype: torch.dtype) -> dict[str, Scalar]:
    """Hyper-parameters as 0-dimensional tensors, so that a new value is no reason to compile again."""
    return {name: torch.tensor(value, dtype=dtype) for name, value in scalars.items()}


@lru_cache(maxsize=64)
def compiled_step(structure: Structure) -> Advance | None:
    """The compiled form of a step, or None (after one warning) where it fails its self-test here."""
    try:
        # The compiler's modules warn about themselves while they load, which must not end a run under -W error.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            advance = _compile(structure, _root_dtype(structure))
            reason = _difference_from_eager(structure, advance)
    except Exception as error:  # The compiler's failures have no common class, and training must go on.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if reason is None:
        return advance
    warnings.warn(
        f"the compiled step of strategy {structure.strategy.name!r} is not used: {reason}; stepping eagerly",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _root_dtype(structure: Structure) -> torch.dtype:
    """The format of the square root: the working one where the compiler rounds it correctly, or none is promised.

    An ulp of the root shows in one of a thousand components or fewer, so the step's own self-test is too weak for
    it.
    """
    wide = wide_dtype(structure.dtype)
    if structure.form == "fast" or _rounds_roots_correctly(structure.device_type):
        return wide
    return torch.float64


@lru_cache(maxsize=8)
def _rounds_roots_correctly(device_type: str) -> bool:
    """Whether the compiled fp32 square root equals fp64's, rounded, on half a million numbers."""
    root = torch.compile(torch.sqrt, dynamic=True, options=dict(_OPTIONS))
    x = torch.rand(1 << 19, generator=torch.Generator().manual_seed(0)).to(device_type)
    return bool(torch.equal(root(x), x.to(torch.float64).sqrt().to(torch.float32)))


def _compile(structure: Structure, root: torch.dtype) -> Advance:
    wide = wide_dtype(structure.dtype)
    step = _step(structure, {})

    def advance(components: State, scalars: Mapping[str, Scalar]) -> None:
        advance_in_wide(step, WideArithmetic(None, wide, root), components, scalars)

    # The compiler counts recompilations by code object: each structure gets its own, or the ninth would be refused.
    code = advance.__code__.replace(co_name=f"advance_{structure.strategy.name.replace('-', '_')}")
    own = FunctionType(code, advance.__globals__, code.co_name, advance.__defaults__, advance.__closure__)
    whole: Advance = torch.compile(own, dynamic=True, fullgraph=True, options=dict(_OPTIONS))
    return whole


def _step(structure: Structure, scalars: Mapping[str, Scalar]) -> Step:
    workspace = Workspace(_TESTED_ELEMENTS, torch.float32, torch.device(structure.device_type))
    return Step(
        rule=structure.rule,
        strategy=structure.strategy,
        moments=structure.moments,
        storage_arithmetic=False,
        maximize=structure.maximize,
        scalars=scalars,
        workspace=workspace,
    )


def _components(structure: Structure) -> State:
    """Random components as a training leaves them: low parts below half an ulp, second moments positive."""
    generator = torch.Generator().manual_seed(0)
    names = ["parameter", "gradient", *component_names(structure.strategy, structure.moments)]
    seconds = {moment.name for moment in structure.moments if moment.second}
    wide = {StateStorage.WIDE: torch.float32}
    kept = {moment.name: structure.strategy.kept(moment.second) for moment in structure.moments}
    found = {}
    for name in names:
        value = torch.randn(_TESTED_ELEMENTS, generator=generator) * 1e-2
        if name.endswith(LOW_COMPONENT_SUFFIX):
            value.mul_(2.0**-12)
        if name.removesuffix(LOW_COMPONENT_SUFFIX) in seconds:
            value.abs_().mul_(1e-2)
        dtype = wide.get(kept.get(name, structure.strategy.parameter), structure.dtype)
        found[name] = value.to(structure.dtype if name in ("parameter", "gradient") else dtype)
    return {name: value.to(structure.device_type) for name, value in found.items()}


def _difference_from_eager(structure: Structure, advance: Advance) -> str | None:
    """Step the same components both ways; what is wrong with the compiled result, or None."""
    numbers: dict[str, Scalar] = {name: 2.0**-4 * (index + 1) for index, name in enumerate(structure.scalar_names)}
    eager = _components(structure)
    compiled = {name: tensor.clone() for name, tensor in eager.items()}
    with torch.no_grad():
        step_tensors(_step(structure, numbers), [Member(0, eager["parameter"], eager["gradient"], eager)])
        advance(compiled, scalar_tensors(numbers, torch.float32))
    low = compiled.get(PARAMETER_LOW)
    if low is not None and int((low != 0).sum()) < _TESTED_ELEMENTS // 2:
        return "the compiler folds the low component to zero"
    for name, tensor in compiled.items():
        if structure.form == "bit-identical" and not torch.equal(tensor, eager[name]):
            return f"{name} differs from the eager step"
        if not torch.allclose(_joined(compiled, name), _joined(eager, name), rtol=_FAST_TOLERANCE, atol=1e-9):
            return f"{name} is too far from the eager step"
    return None


def _joined(components: State, name: str) -> torch.Tensor:
    """A component with its low part, in fp64."""
    low = components.get(name + LOW_COMPONENT_SUFFIX)
    value = components[name].double()
    return value if low is None else value + low.double()
