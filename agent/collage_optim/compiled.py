"""The compiled step: the same code through torch.compile or as a kernel, trusted only after a self-test.

On a CPU torch's compiler makes it, vector by vector; on a device it is one kernel for all tensors
(`collage_optim.device_step`).

By default the compiler keeps fp32 between two casts, so that `value - value.to(bfloat16)` folds to zero and every
low component with it. Emulated casts prevent that; before the first real step, the self-test proves it on this
machine, and that every bit is the eager step's. A compiled step of `plus` takes a third to a fifth of the eager
step's CPU time (`benchmarks.optimizer`).
"""

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import FunctionType
from typing import Any, cast

import torch

from collage_optim import cpu_vectors, integer_codes
from collage_optim.advance import Advance, AskedTotals, Run, Step, advance_in_wide
from collage_optim.arithmetic import Scalar, State, WideArithmetic, Workspace
from collage_optim.device_code import CHUNK_ELEMENTS
from collage_optim.device_step import DeviceStep
from collage_optim.from_host import from_host
from collage_optim.random_numbers import RandomSource, Seeding
from collage_optim.step_totals import FoundTotals, advance_and_add
from collage_optim.strategies import MASTER_PARAMETER, PARAMETER_LOW, StateStorage, StorageStrategy
from collage_optim.tensor_step import Member, chunks, component_names, step_tensors, wide_dtype
from collage_optim.update_rules import Moment, UpdateRule

__all__ = [
    "COMPILER_OPTIONS",
    "DirectCall",
    "Structure",
    "TESTED_ELEMENTS",
    "adds_totals",
    "check_compiled",
    "compiled_step",
    "device_step",
    "pack_scalars",
]

TESTED_ELEMENTS = 65_547
"""Of the self-test, for which a step is compiled: neither whole words nor, of words or elements, whole vectors."""
_TESTED_SEEDING = Seeding(0, 1)
_ALIGNED_ELEMENTS = 65_536
"""Of the self-test of a kernel, which has a form of its own for whole vectors."""
Options = dict[str, str | int | bool | Callable[..., object]]
COMPILER_OPTIONS: Options = {"emulate_precision_casts": True}
"""With which torch's compiler computes like eager steps."""

_Code = Callable[..., object]
_Packed = Callable[[State, torch.Tensor, torch.Tensor | None], Run]


@dataclass(frozen=True)
class Structure:
    """The key of a compiled step: everything but sizes and values of hyper-parameters."""

    rule: UpdateRule
    strategy: StorageStrategy
    moments: tuple[Moment, ...]
    maximize: bool
    dtype: torch.dtype
    device_type: str
    scalar_names: tuple[str, ...]
    is_coupled: bool = False


def check_compiled(compiled: bool | None, arithmetic: str, strategy: StorageStrategy, on_cpu: bool) -> None:
    """Raise ValueError for a compiled step that does not exist."""
    if compiled is not None and not isinstance(compiled, bool):
        raise ValueError(f"Invalid compiled: {compiled!r}; use True (its bits are the eager step's) or False")
    if compiled and arithmetic != "fp32":
        raise ValueError(f"compiled=True is for arithmetic 'fp32'; leave it out with {arithmetic!r}")
    if compiled and on_cpu and any(storage.has_scales for storage in strategy.storages):
        raise ValueError(f"compiled=True has no blocks on a CPU; leave it out with {strategy.name!r}")


def pack_scalars(scalars: Mapping[str, Scalar], dtype: torch.dtype, device: torch.device) -> dict[str, Scalar]:
    """Hyper-parameters as one tensor: a new value is no reason to compile again, and there is one to guard."""
    return {"packed": from_host(torch.tensor(list(scalars.values()), dtype=dtype), device)}


@lru_cache(maxsize=64)
def compiled_step(structure: Structure) -> Advance | None:
    """The compiled form of a step on a CPU, or None (after one warning) where it fails its self-test here."""
    try:
        # The compiler's modules warn about themselves while they load, which must not end a run under -W error.
        with warnings.catch_warnings(action="ignore"), cpu_vectors.casts_in_registers():
            root = wide_dtype(structure.dtype) if _rounds_roots_correctly() else torch.float64
            advance = _compile(structure, root)
            device = torch.device(structure.device_type)

            def stepped(components: State, numbers: Mapping[str, Scalar]) -> None:
                source = _TESTED_SEEDING.at(0) if structure.strategy.stochastic else None
                advance(components, pack_scalars(numbers, wide_dtype(structure.dtype), device), source)()

            reason = _difference_from_eager(structure, stepped, TESTED_ELEMENTS)
    except Exception as error:  # The compiler's failures have no common class, and training must go on.
        reason = _described(error)
    if reason is None:
        return advance
    _warn(structure, reason)
    return None


@lru_cache(maxsize=64)
def device_step(structure: Structure) -> DeviceStep | None:
    """The kernel of a step, or None (after one warning) where it cannot be built or fails its self-test here."""
    try:
        kernel = DeviceStep(_step(structure, dict.fromkeys(structure.scalar_names, 0.0)))

        def stepped(components: State, numbers: Mapping[str, Scalar]) -> None:
            step = replace(_step(structure, numbers), launch=kernel)
            step_tensors(step, _members(components))

        differences = (_difference_from_eager(structure, stepped, n) for n in (TESTED_ELEMENTS, _ALIGNED_ELEMENTS))
        reason = next(filter(None, differences), None)
    except Exception as error:  # Triton's failures have no common class either.
        reason = _described(error)
    if reason is None:
        return kernel
    _warn(structure, reason)
    return None


@lru_cache(maxsize=64)
def adds_totals(structure: Structure) -> bool:
    """Whether the kernel of a step can add up its totals: the eager step's bits, and its sums.

    Where not, one line is logged: nothing that trains depends on it.
    """
    kernel = device_step(structure)
    if kernel is None or structure.dtype == torch.float64:
        return False
    found: list[FoundTotals] = []

    def stepped(components: State, numbers: Mapping[str, Scalar]) -> None:
        asked = AskedTotals(numbers, found)
        step = replace(_step(structure, numbers), launch=kernel, asked=asked)
        step_tensors(step, _members(components))

    try:
        sizes = (TESTED_ELEMENTS, _ALIGNED_ELEMENTS)
        reason = next(filter(None, (_difference_from_eager(structure, stepped, size) for size in sizes)), None)
        reason = reason or _difference_of_totals(structure, found[-1])
    except Exception as error:  # As in `device_step`.
        reason = _described(error)
    if reason is not None:
        told = "the totals of steps of strategy %r are not added up in their kernel: %s"
        logging.getLogger("collage_optim").warning(told, structure.strategy.name, reason)
    return reason is None


def _difference_of_totals(structure: Structure, found: FoundTotals) -> str | None:
    """The sum that differs from the one of an eager step of the same elements, whole chunks, or None."""
    numbers = _tested_numbers(structure)
    step, flat, first = _step(structure, numbers), _components(structure, _ALIGNED_ELEMENTS), 0
    exact = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
    expected = torch.zeros(len(found.names), dtype=torch.float64, device=flat["parameter"].device)
    for chunk in chunks(dict(integer_codes.unpacked(flat)), CHUNK_ELEMENTS):
        source = None if step.seeding is None else step.seeding.at(0).from_element(first)
        sums = advance_and_add(step, WideArithmetic(), chunk, numbers, exact, source)
        expected += torch.stack([sums[name] for name in found.names])
        first += CHUNK_ELEMENTS
    alike = torch.isclose(found.sums[0, : len(expected)], expected, rtol=1e-9, atol=0.0).tolist()
    return next((f"{name} differs" for name, same in zip(found.names, alike, strict=True) if not same), None)


def _described(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _warn(structure: Structure, reason: str) -> None:
    warnings.warn(
        f"the compiled step of strategy {structure.strategy.name!r} is not used: {reason}; stepping eagerly",
        RuntimeWarning,
        stacklevel=3,
    )


@lru_cache(maxsize=1)
def _rounds_roots_correctly() -> bool:
    """Whether the compiled fp32 square root equals fp64's, rounded, on half a million numbers.

    Elsewhere the root is taken in fp64, which makes the whole step 1.8 times as dear. An ulp of the root shows in
    one of a thousand components or fewer, so the step's own self-test is too weak for it.
    """

    def square_root(x: torch.Tensor) -> torch.Tensor:
        # Not torch's function itself: its compiled forms would be shared with other callers of torch.compile.
        return torch.sqrt(x)

    root = torch.compile(square_root, dynamic=True, options=COMPILER_OPTIONS)
    x = torch.rand(1 << 19, generator=torch.Generator().manual_seed(0))
    return bool(torch.equal(root(x), x.to(torch.float64).sqrt().to(torch.float32)))


def _uncompiled(structure: Structure, root: torch.dtype) -> FunctionType:
    """The step as the compiler is given it."""
    wide = wide_dtype(structure.dtype)
    step = _step(structure, {})
    in_words = _is_stepped_in_words(structure)
    dtypes = {name: tensor.dtype for name, tensor in _components(structure).items()} if in_words else {}
    rounded = [name for name, dtype in dtypes.items() if dtype == torch.bfloat16 and not _is_cut(structure, name)]

    def advance(components: State, packed: torch.Tensor, numbers: torch.Tensor | None) -> None:
        scalars = dict(zip(structure.scalar_names, packed.unbind(), strict=True))
        source = None if numbers is None else RandomSource.of_numbers(numbers)
        if not in_words:
            advance_in_wide(step, WideArithmetic(None, wide, root), components, scalars, source)
            return
        parts = []
        for place in range(cpu_vectors.ELEMENTS):
            part = {name: cpu_vectors.unpacked(word, place, dtypes[name]) for name, word in components.items()}
            part.update({name: part[name].to(torch.bfloat16) for name in rounded})
            own = None if source is None else source.from_element(place)
            advance_in_wide(step, WideArithmetic(None, wide, root, cpu_vectors.ELEMENTS), part, scalars, own)
            parts.append(part)
        for name, word in components.items():
            if name != "gradient":
                word.copy_(cpu_vectors.packed([part[name] for part in parts], dtypes[name]))

    return cast(FunctionType, advance)


def _compile(structure: Structure, root: torch.dtype) -> Advance:
    advance = _uncompiled(structure, root)
    # The compiler counts recompilations by code object: each structure gets its own, or the ninth would be refused.
    code = advance.__code__.replace(co_name=f"advance_{structure.strategy.name.replace('-', '_')}")
    own = FunctionType(code, advance.__globals__, code.co_name, advance.__defaults__, advance.__closure__)
    stepped = functools.partial(_advance, DirectCall(own, COMPILER_OPTIONS))
    if not _is_stepped_in_words(structure):
        return stepped
    return functools.partial(_advance_in_words, stepped, _step(structure, {}), structure.scalar_names)


def _is_stepped_in_words(structure: Structure) -> bool:
    """Whether the step computes with bits, and keeps all in 16 bits or fewer."""
    strategy = structure.strategy
    bits = strategy.stochastic or strategy.is_coded
    return bits and structure.dtype == torch.bfloat16 and not strategy.keeps_wide


def _is_cut(structure: Structure, name: str) -> bool:
    """Whether a step reads these numbers only, or stores bits cut to bfloat16's. As fp32 they then need no rounding
    by the compiler, which takes a dozen operations: a third of the step.
    """
    strategy = structure.strategy
    storages = {"parameter": (strategy.parameter, strategy.stochastic_parameter)}
    for moment in structure.moments:
        at_random = strategy.stochastic_moment(moment.second)
        storages[moment.name] = strategy.moment_storage(moment.second), at_random
    if name not in storages:
        return name == "gradient"
    storage, at_random = storages[name]
    return storage.is_split or (at_random and storage is StateStorage.SINGLE)


def _advance(whole: _Packed, components: State, scalars: Mapping[str, Scalar], source: RandomSource | None) -> Run:
    numbers = None if source is None else from_host(source.numbers(), components["parameter"].device)
    return whole(components, torch.as_tensor(scalars["packed"]), numbers)


def _advance_in_words(
    stepped: Advance,
    step: Step,
    scalar_names: tuple[str, ...],
    components: State,
    scalars: Mapping[str, Scalar],
    source: RandomSource | None,
) -> Run:
    """Whole words are stepped compiled, and the few elements behind them eagerly."""
    elements = components["parameter"].numel()
    # The compiler treats a size of one as a constant, and would compile again.
    within = elements - elements % cpu_vectors.ELEMENTS if elements >= 2 * cpu_vectors.ELEMENTS else 0
    runs: list[Run] = []
    if within:
        whole = components
        if within < elements:
            whole = {name: tensor[:within] for name, tensor in components.items()}
        if all(map(cpu_vectors.begins_at_a_word, whole.values())):
            runs.append(stepped(cpu_vectors.words(whole), scalars, source))
        else:
            # Not now: copies of all tensors together would take the memory of a second model.
            runs.append(functools.partial(_advance_copies, stepped, whole, scalars, source))
    if within < elements:
        rest = {name: tensor[within:] for name, tensor in components.items()}
        named = dict(zip(scalar_names, torch.as_tensor(scalars["packed"]).unbind(), strict=True))
        behind = source and source.from_element(within)
        runs.append(functools.partial(advance_in_wide, step, WideArithmetic(), rest, named, behind))
    return runs[0] if len(runs) == 1 else functools.partial(_all, runs)


def _advance_copies(
    stepped: Advance, components: State, scalars: Mapping[str, Scalar], source: RandomSource | None
) -> None:
    own = cpu_vectors.words(components)
    stepped(own, scalars, source)()
    for name, tensor in components.items():
        if own[name].data_ptr() != tensor.data_ptr() and name != "gradient":
            tensor.copy_(own[name].view(tensor.dtype))


def _all(runs: list[Run]) -> None:
    for run in runs:
        run()


def _step(structure: Structure, scalars: Mapping[str, Scalar]) -> Step:
    elements = max(TESTED_ELEMENTS, _ALIGNED_ELEMENTS)
    workspace = Workspace(elements, wide_dtype(structure.dtype), torch.device(structure.device_type))
    return Step(
        dtype=structure.dtype,
        rule=structure.rule,
        strategy=structure.strategy,
        moments=structure.moments,
        storage_arithmetic=False,
        maximize=structure.maximize,
        scalars=scalars,
        workspace=workspace,
        seeding=_TESTED_SEEDING if structure.strategy.stochastic else None,
        is_coupled=structure.is_coupled,
    )


def _members(components: State) -> list[Member]:
    components["parameter"].grad = components["gradient"]
    return [Member(0, components["parameter"], components)]


def _components(structure: Structure, elements: int = TESTED_ELEMENTS) -> State:
    """Random components as a training leaves them: low parts below half an ulp, second moments positive.

    In the order of a step: the compiler would compile once more for another.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(elements, generator=generator) * 1e-2

    value, strategy = drawn(), structure.strategy
    found = {"parameter": value.to(structure.dtype), "gradient": drawn().to(structure.dtype)}
    if strategy.parameter_state == MASTER_PARAMETER:
        found[MASTER_PARAMETER] = value
    elif strategy.parameter_state == PARAMETER_LOW:
        found[PARAMETER_LOW] = integer_codes.empty_low(strategy.parameter, found["parameter"])
        integer_codes.store(WideArithmetic(), value, found, "parameter", strategy.parameter)
    for moment in structure.moments:
        average = drawn().abs().mul_(1e-2) if moment.second else drawn()
        storage = strategy.moment_storage(moment.second)
        kept = integer_codes.state_of(moment.name, average, storage, moment.second, found["parameter"], found)
        found.update(kept)
    names = ["parameter", "gradient", *component_names(strategy, structure.moments)]
    return {name: found[name].to(structure.device_type) for name in names}


def _tested_numbers(structure: Structure) -> dict[str, Scalar]:
    return {name: 2.0**-4 * (index + 1) for index, name in enumerate(structure.scalar_names)}


def _difference_from_eager(
    structure: Structure, stepped: Callable[[State, Mapping[str, Scalar]], None], elements: int
) -> str | None:
    """Step the same components both ways; returns the fault of the compiled result, or None."""
    numbers = _tested_numbers(structure)
    eager = _components(structure, elements)
    compiled = {name: tensor.clone() for name, tensor in eager.items()}
    with torch.no_grad():
        step_tensors(_step(structure, numbers), _members(eager))
        stepped(compiled, numbers)
    low = compiled.get(PARAMETER_LOW)
    if low is not None and int((low != 0).sum()) < elements // 2:
        return "the compiler folds the low component to zero"
    for name, tensor in compiled.items():
        if not torch.equal(tensor, eager[name]):
            return f"{name} differs from the eager step"
    return None


class DirectCall:
    """`step(components, packed, numbers)` compiled on a CPU for vectors of any one length.

    Called past the checks of torch's compiler: at each call they look at all that the code could depend on. After a
    kernel has swept the caches, this takes a tenth of a millisecond and more: at 10 million parameters in 76
    tensors, a sixth of the step. Ours depends on the formats of the vectors, of which only the gradient's may be
    another one, and on there being more than one element.

    Calls of a single element go through the compiler, and the first one for each format of the gradient. It shows
    which of our tensors is which input of the compiled code; where that is not plain, all calls go through the
    compiler.
    """

    def __init__(self, step: Callable[..., None], options: dict[str, Any]) -> None:
        self._options = options
        self._checked = torch.compile(step, dynamic=True, fullgraph=True, backend=self._compiled)
        self._called: tuple[_Code, Sequence[object]] | None = None
        self._direct: dict[torch.dtype, tuple[_Code, list[str]]] = {}

    def __call__(self, components: State, packed: torch.Tensor, numbers: torch.Tensor | None) -> Run:
        """The step of these components, which is made when the result is called."""
        gradient = components["gradient"]
        sizes = {f"size {dim}": size for dim, size in enumerate(gradient.shape)}
        given = {**components, "packed": packed, "numbers": numbers, **sizes}
        direct = self._direct.get(gradient.dtype) if gradient.shape[0] > 1 else None
        if direct is None:
            return functools.partial(self._first, components, packed, numbers, given)
        code, names = direct
        return functools.partial(code, *[given[name] for name in names])

    def _first(
        self, components: State, packed: torch.Tensor, numbers: torch.Tensor | None, given: dict[str, Any]
    ) -> None:
        self._checked(components, packed, numbers)
        called, self._called = self._called, None
        if called is not None and given["gradient"].shape[0] > 1:
            code, inputs = called
            names = [_name(value, given) for value in inputs]
            if all(names):
                self._direct[given["gradient"].dtype] = code, names

    def _compiled(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> _Code:
        from torch._inductor import compile

        code = compile(graph, inputs, self._options)

        def noted(*inputs: object) -> object:
            self._called = code, inputs
            return code(*inputs)

        return noted


def _name(value: object, given: dict[str, Any]) -> str:
    """The name of an input; "" if it is ambiguous."""
    if isinstance(value, int):
        found = [name for name, own in given.items() if isinstance(own, int) and own == value]
    else:
        found = [name for name, own in given.items() if own is value]
    return found[0] if len(found) == 1 else ""
