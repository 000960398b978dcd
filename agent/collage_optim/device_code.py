"""Torch's operations on vectors, recorded and written down as a Triton kernel.

A step is written once, in torch's operations. `Recorder` runs it over one chunk of elements that exist in name
only and notes what it does; `kernel_source` makes a kernel of that: it loads the components of a chunk, carries out
the same operations in registers, and stores what was changed. So rules, storages, random bits and coupled rounding
have no second form that could differ, those of other packages included. An operation that is not in the tables is
refused (`UnsupportedOperation`), and the step is then taken eagerly.

Every operation is rounded as torch rounds it: products and sums separately, quotients and roots to nearest, casts
to bfloat16 in integers. bfloat16 numbers are fp32 ones in registers. `device_step.py` launches the kernels
(`tests/optim/test_device_step.py`). Triton itself is imported where a kernel is built, never before.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CHUNK_ELEMENTS", "Recorder", "UnsupportedOperation", "built", "kernel_source"]

CHUNK_ELEMENTS: Final = 1024
"""Elements that one program of a kernel steps."""

_TYPES: Final = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.float32",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
"""What a dtype is in registers."""
_HALVES: Final = (torch.bfloat16, torch.float16)
_COMPARED: Final = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
_INFIX: Final = {
    "mul": "*",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "__lshift__": "<<",
    "__rshift__": ">>",
    "bitwise_left_shift": "<<",
    "bitwise_right_shift": ">>",
}
_CALLS: Final = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "floor": "_floor({0})",
    "reciprocal": "tl.div_rn({one}, {0})",
    "round": "_to_even({0})",
    "sign": "tl.where({0} > {zero}, {one}, tl.where({0} < {zero}, -{one}, {zero}))",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "copysign": "_with_sign({0}, {1})",
    "addcmul": "{0} + {value} * ({1} * {2})",
    "addcdiv": "{0} + {value} * tl.div_rn({1}, {2})",
    "lerp": "tl.where({2} < {half}, {0} + {2} * ({1} - {0}), {1} - ({1} - {0}) * ({one} - {2}))",
}
"""Operations whose operands are of the result's dtype."""
_OF_FP32: Final = ("floor", "reciprocal", "round", "copysign", "addcdiv")
_MADE: Final = ("empty_like", "empty", "new_empty", "empty_strided", "new_empty_strided")
_FILLED: Final = {"zeros_like": 0, "ones_like": 1, "zeros": 0, "ones": 1, "zero": 0}

_HEAD = '''
import triton
import triton.language as tl


@triton.jit
def _to_bfloat16(value):
    """fp32 rounded to a bfloat16 number, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 32767 + ((bits >> 16) & 1)) & -65536
    return tl.where(value != value, 2143289344, rounded).to(tl.float32, bitcast=True)


@triton.jit
def _to_even(value):
    """fp32 rounded to an integer, ties to even, with its sign."""
    magnitude = tl.abs(value)
    rounded = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
    return _with_sign(rounded, value)


@triton.jit
def _floor(value):
    """fp32 rounded down. Triton's own may take subnormal numbers for 0: -1e-40 would become 0, not -1."""
    cut = value.to(tl.int32).to(tl.float32)
    rounded = tl.where(tl.abs(value) < 8388608.0, tl.where(cut > value, cut - 1.0, cut), value)
    return _with_sign(rounded, value)


@triton.jit
def _with_sign(value, sign):
    bits = (value.to(tl.int32, bitcast=True) & 2147483647) | (sign.to(tl.int32, bitcast=True) & -2147483648)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _at_least(value, bound):
    return tl.where(value < bound, bound, value)


@triton.jit
def _at_most(value, bound):
    return tl.where(value > bound, bound, value)


@triton.jit
def _largest(value):
    """Of each row of sizes, fp32 and none below 0; NaN where one is: as integers they have the same order."""
    bits = value.to(tl.int32, bitcast=True) & 2147483647
    return tl.max(bits, axis=1).to(tl.float32, bitcast=True)
'''


class UnsupportedOperation(RuntimeError):
    """An operation that no kernel is written for; the message names it."""


@dataclass(frozen=True)
class _Value:
    """What lies in a storage: a variable of the kernel, its dtype as torch has it, and its shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class _Component:
    """A tensor of which the kernel is given the address; load: whether its elements are read, store: changed."""

    name: str
    tensor: Tensor
    load: bool = False
    store: bool = False


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that are carried out under it, on tensors of the device "meta".

    components: those of one chunk, by name; their addresses are given to the kernel in this order. Beside the
    chunk's CHUNK_ELEMENTS elements, a tensor may have one for each block of them.
    numbers: tensors of no dimension, and the expressions of the kernel that have their values.
    """

    def __init__(self, components: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self.components = [_Component(name, tensor) for name, tensor in components.items()]
        self._by_storage = {_storage(own.tensor): own for own in self.components}
        # A storage that were freed would give its key to the next one.
        self._held: list[object] = [components, numbers]
        self._values = {
            _storage(tensor): _Value(expression, tensor.dtype, ()) for expression, tensor in numbers.items()
        }

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._held.append(result)
        changed = [
            given
            for argument, given in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        target = kwargs.get("out", changed[0] if changed else result)
        if not isinstance(target, Tensor):
            raise UnsupportedOperation(f"{func} of {len(result) if isinstance(result, tuple) else 'no'} results")
        name = func.overloadpacket.__name__
        if changed or "out" in kwargs:
            name = name.removesuffix("_")
        elif any(isinstance(given, Tensor) and _storage(given) == _storage(result) for given in args):
            return result  # A view: read as such where it is used.
        if name not in _MADE:
            self.write(target, *self._computed(name, args, kwargs, target))
        return result

    def read(self, tensor: Tensor, dtype: torch.dtype | None = None) -> str:
        """The variable that holds a tensor, as `dtype` if given."""
        key = _storage(tensor)
        if key not in self._values:
            if key not in self._by_storage:
                raise UnsupportedOperation(f"reading elements that nothing has written ({tensor.dtype})")
            component = self._by_storage[key]
            component.load = True
            own = component.tensor
            self._values[key] = _Value(component.name, own.dtype, tuple(own.shape))
        value = self._values[key]
        found = value.name
        if value.dtype != tensor.dtype:
            if value.dtype.itemsize != tensor.dtype.itemsize or torch.bfloat16 in (value.dtype, tensor.dtype):
                raise UnsupportedOperation(f"the bits of {value.dtype} as {tensor.dtype}")
            found = self._line(f"{found}.to({_TYPES[tensor.dtype]}, bitcast=True)")
        found = self._shaped(found, value.shape, tensor)
        return self.cast(found, tensor.dtype, dtype or tensor.dtype)

    def write(self, tensor: Tensor, expression: str, dtype: torch.dtype) -> None:
        """Set a whole tensor to an expression of `dtype`."""
        if tensor.storage_offset() or tensor.numel() * tensor.itemsize != tensor.untyped_storage().nbytes():
            raise UnsupportedOperation("writing a part of a tensor")
        key, shape = _storage(tensor), tuple(tensor.shape)
        name = self.cast(self._line(expression), dtype, tensor.dtype)
        self._values[key] = _Value(name, tensor.dtype, shape)
        if key in self._by_storage:
            self._by_storage[key].store = True

    def cast(self, name: str, was: torch.dtype, dtype: torch.dtype) -> str:
        """A variable of dtype `was` as `dtype`, rounded as torch does."""
        if was == dtype or (was, dtype) == (torch.bfloat16, torch.float32):
            return name
        if dtype in _HALVES and was == torch.float64:
            # As torch: by way of fp32.
            name = self.cast(name, was, torch.float32)
        if dtype == torch.bfloat16:
            wide = self.cast(name, was, torch.float32)
            return self._line(f"_to_bfloat16({wide})")
        if was.is_floating_point and dtype in (torch.int8, torch.uint8, torch.int16):
            name = self._line(f"{name}.to(tl.int32)")
        return self._line(f"{name}.to({_TYPES[dtype]})")

    def _line(self, expression: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def _shaped(self, name: str, shape: tuple[int, ...], tensor: Tensor) -> str:
        own = tuple(tensor.shape)
        kept = tuple(1 if stride == 0 else size for size, stride in zip(own, tensor.stride(), strict=True))
        if torch.Size(kept).numel() != torch.Size(shape).numel() or tensor.storage_offset():
            raise UnsupportedOperation(f"a part of a tensor: {own} of {shape}")
        if kept != shape:
            name = self._line(f"tl.reshape({name}, {_tuple(kept)})")
        return name if kept == own else self._line(f"tl.broadcast_to({name}, {_tuple(own)})")

    def _computed(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], target: Tensor
    ) -> tuple[str, torch.dtype]:
        """The expression of an operation, and its dtype."""
        dtype = torch.float32 if target.dtype in _HALVES else target.dtype
        if name in _COMPARED:
            operands = torch.result_type(args[0], args[1])
            operands = torch.float32 if operands in _HALVES else operands
            first, second = (self._operand(given, operands) for given in args[:2])
            return f"{first} {_COMPARED[name]} {second}", torch.bool
        if name in ("_to_copy", "clone", "copy", "lift_fresh_copy", "detach"):
            source = args[1] if name == "copy" else args[0]
            return self.read(source, target.dtype), target.dtype
        if name == "where":
            given = [self._operand(part, dtype) for part in args[1:]]
            return f"tl.where({self.read(args[0])}, {given[0]}, {given[1]})", dtype
        if name == "arange":
            if args not in ((CHUNK_ELEMENTS,), (0, CHUNK_ELEMENTS)) or target.dtype != torch.int32:
                raise UnsupportedOperation(f"arange{args}")
            return "lanes", torch.int32
        if name == "amax":
            return self._largest(args), torch.float32
        if name == "sum":
            return self._sum(args), target.dtype
        if name in (*_FILLED, "full_like", "full", "scalar_tensor", "fill"):
            number = _FILLED[name] if name in _FILLED else args[0 if name == "scalar_tensor" else 1]
            return f"tl.full({_tuple(tuple(target.shape))}, {number!r}, {_TYPES[dtype]})", dtype
        return self._arithmetic(name, args, kwargs, dtype)

    def _arithmetic(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
    ) -> tuple[str, torch.dtype]:
        """The expression of an operation whose operands are all of the result's dtype."""
        if name == "pow" and args[1] == 2:
            name, args = "mul", (args[0], args[0])
        if name == "rsub":
            name, args = "sub", (args[1], args[0])
        operands = [self._operand(given, dtype) for given in args if given is not None]
        if name in ("add", "sub"):
            alpha = kwargs.get("alpha", 1)
            second = operands[1] if alpha == 1 else f"{operands[1]} * {self._operand(alpha, dtype)}"
            return f"{operands[0]} {'+' if name == 'add' else '-'} {second}", dtype
        if name in _INFIX:
            sign = "&" if dtype == torch.bool and name == "mul" else _INFIX[name]
            return f"{operands[0]} {sign} {operands[1]}", dtype
        if name == "div" and dtype.is_floating_point:
            wide = dtype == torch.float64
            return f"{operands[0]} / {operands[1]}" if wide else f"tl.div_rn({operands[0]}, {operands[1]})", dtype
        if name == "sqrt":
            return f"tl.{'sqrt' if dtype == torch.float64 else 'sqrt_rn'}({operands[0]})", dtype
        if name == "bitwise_not":
            return f"~{operands[0]}", dtype
        if name in ("clamp", "clamp_min", "clamp_max"):
            given = (args[0], None, *args[1:]) if name == "clamp_max" else args
            return self._clamped(given, kwargs, dtype), dtype
        if name == "nan_to_num":
            if args[1:] != (0.0, 0.0, 0.0):
                raise UnsupportedOperation(f"nan_to_num{tuple(args[1:])}")
            finite = f"{operands[0]} - {operands[0]} == {self._operand(0.0, dtype)}"
            return f"tl.where({finite}, {operands[0]}, {self._operand(0.0, dtype)})", dtype
        if name not in _CALLS or (dtype == torch.float64 and name in _OF_FP32):
            raise UnsupportedOperation(f"torch's {name} of {dtype}")
        numbers = {"zero": 0, "half": 0.5, "one": 1, "value": kwargs.get("value", 1)}
        needed = {key: self._operand(own, dtype) for key, own in numbers.items() if f"{{{key}}}" in _CALLS[name]}
        return _CALLS[name].format(*operands, **needed), dtype

    def _operand(self, given: Tensor | float, dtype: torch.dtype) -> str:
        if isinstance(given, Tensor):
            if given.device.type != "meta":
                raise UnsupportedOperation(f"a tensor on {given.device} within the step")
            return self.read(given, dtype)
        if dtype.is_floating_point:
            number = repr(float(given))
            number = number if number[-1].isdigit() else f'float("{number}")'
            return f"tl.full([], {number}, {_TYPES[dtype]})"
        return repr(given)

    def _clamped(self, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> str:
        bounds = [*args[1:], None, None][:2]
        low, high = (kwargs.get(key, own) for key, own in zip(("min", "max"), bounds, strict=True))
        found = self.read(args[0], dtype)
        for bound, call in ((low, "_at_least"), (high, "_at_most")):
            if bound is not None:
                limit = self._operand(bound, dtype)
                found = f"{call}({found}, {limit})"
                if isinstance(bound, Tensor):
                    # As torch: where a bound is not a number, the result is none.
                    found = f"tl.where({limit} == {limit}, {found}, {limit})"
        return found

    def _largest(self, args: Sequence[Any]) -> str:
        """The largest of each block. Elements behind the tensor's end count as 0."""
        given, dimensions = args[0], args[1]
        if list(dimensions) not in ([1], [-1]) or given.dtype != torch.float32 or given.numel() != CHUNK_ELEMENTS:
            raise UnsupportedOperation(f"amax over {dimensions} of {tuple(given.shape)}")
        shape = _tuple(tuple(given.shape))
        within = self._line(f"tl.where(tl.reshape(within, {shape}), {self.read(given)}, 0.0)")
        return f"_largest({within})"

    def _sum(self, args: Sequence[Any]) -> str:
        """The sum of each row, or of a vector. Elements behind the tensor's end count as 0."""
        given, dimensions = args[0], list(args[1]) if len(args) > 1 else []
        if given.dtype not in (torch.float64, torch.int64) or dimensions not in ([], [1]) or len(args) > 2:
            raise UnsupportedOperation(f"sum over {dimensions} of {given.dtype}")
        if given.dim() != 1 + len(dimensions):
            raise UnsupportedOperation(f"sum over {dimensions} of {tuple(given.shape)}")
        found = self.read(given)
        if given.numel() == CHUNK_ELEMENTS:
            within = f"tl.reshape(within, {_tuple(tuple(given.shape))})"
            found = self._line(f"tl.where({within}, {found}, {self._operand(0, given.dtype)})")
        return f"tl.sum({found}, axis={len(dimensions)})"


def kernel_source(name: str, recorder: Recorder, sums: Sequence[Tensor] = (), columns_of_sums: int = 0) -> str:
    """A kernel of what was recorded. sums: of each chunk, of no dimension, which it stores as a row.

    Its arguments, in this order:
    COMPONENT_of, for each component: the addresses of the tensors' elements, int64 [tensors].
    sizes: the elements of each tensor, int64 [tensors].
    sources: the start and the flipped bits of its random numbers, int32 [tensors, 2].
    chunks: a tensor and which of its chunks, for each program, int32 [programs, 2].
    scalars: the numbers of the step. turned: the rotation of its random numbers, int32 [1].
    ALIGNED: bytes of which all addresses, and elements of which all sizes are multiples: 16, or 1.
    exact, rows, where there are sums: numbers in double precision, and for each program a row of the sums, fp64
    [programs, columns_of_sums].
    """
    stored = [(own, recorder.read(own.tensor)) for own in recorder.components if own.store]
    used = [own for own in recorder.components if own.load or own.store]
    parts = [
        *([_address(own)] for own in used),
        *(_load(own) for own in used if own.load),
        recorder.lines,
        *([_store(own, value)] for own, value in stored),
        [f"tl.store(row + {place}, {recorder.read(total)})" for place, total in enumerate(sums)],
    ]
    body = "\n    ".join(line for part in parts for line in part)
    columns = ", ".join(f"{own.name}_of" for own in recorder.components)
    given = f"{columns}, sizes, sources, chunks, scalars, turned{', exact, rows' if sums else ''}"
    row = f"row = rows + tl.program_id(0).to(tl.int64) * {columns_of_sums}" if sums else ""
    return f"""{_HEAD}

@triton.jit
def {name}({given}, ALIGNED: tl.constexpr):
    which = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * {CHUNK_ELEMENTS}
    left = tl.minimum(tl.load(sizes + which) - first, {CHUNK_ELEMENTS}).to(tl.int32)
    left = tl.multiple_of(left, ALIGNED)
    lanes = tl.arange(0, {CHUNK_ELEMENTS})
    within = lanes < left
    {row}
    {body}
"""


def built(name: str, source: str) -> Any:
    """The function of this name in a kernel's source, as Triton's `jit` makes it; in its interpreter if
    TRITON_INTERPRET is set. Raises ImportError without Triton."""
    file = f"<{name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    # Triton reads a function's source where Python's own tools find it.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": f"{__name__}.{name}"}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tuple(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _lanes(component: _Component) -> tuple[str, str, str]:
    """The offsets of a component's elements in a chunk, which of them there are, and the first one."""
    elements = component.tensor.numel()
    if elements == CHUNK_ELEMENTS:
        return "lanes", "within", "first"
    of_a_block = CHUNK_ELEMENTS // elements
    lanes = f"tl.arange(0, {elements})"
    return lanes, f"{lanes} * {of_a_block} < left", f"first // {of_a_block}"


def _address(component: _Component) -> str:
    dtype = component.tensor.dtype
    pointed = "tl.int16" if dtype == torch.bfloat16 else _TYPES[dtype]
    found = f"tl.load({component.name}_of + which).to(tl.pointer_type({pointed})) + {_lanes(component)[2]}"
    if component.tensor.numel() == CHUNK_ELEMENTS:
        found = f"tl.multiple_of({found}, ALIGNED)"
    return f"{component.name}_at = {found}"


def _load(component: _Component) -> list[str]:
    name = component.name
    lanes, within, _ = _lanes(component)
    lines = [f"{name} = tl.load({name}_at + {lanes}, mask={within}, other=0)"]
    if component.tensor.dtype == torch.bfloat16:
        lines.append(f"{name} = ({name}.to(tl.int32) << 16).to(tl.float32, bitcast=True)")
    return lines


def _store(component: _Component, value: str) -> str:
    lanes, within, _ = _lanes(component)
    if component.tensor.dtype == torch.bfloat16:
        value = f"({value}.to(tl.int32, bitcast=True) >> 16).to(tl.int16)"
    return f"tl.store({component.name}_at + {lanes}, {value}, mask={within})"
