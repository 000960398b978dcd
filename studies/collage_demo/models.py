"""A small byte-level GPT and BERT: learned positions, pre-norm blocks, an output matrix that is not tied.

The demo, the studies and benchmarks train them. On a CPU they compute products in fp32 from bf16 weights and round
once. Most processors have no unit for bfloat16 products: torch multiplies such matrices eleven times slower than
fp32 ones (AVX2, one thread). Figures become alike on every processor, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from collage_demo.corpus import NO_TARGET

__all__ = ["ByteBERT", "ByteGPT", "compute_products_in_fp32", "loss_of"]

_BYTES = 256
Model = TypeVar("Model", bound=nn.Module)
_NARROW = (torch.bfloat16, torch.float16)
_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        functional.linear,
        functional.scaled_dot_product_attention,
        torch.addmm,
        torch.gru,
        torch.matmul,
        Tensor.matmul,
    }
)


class ByteGPT(nn.Module):
    """Predicts the next byte: int64 [batch, length] to logits [batch, length, 256] in the weights' dtype."""

    symbols = _BYTES
    causal = True

    def __init__(self, *, layers: int = 4, width: int = 128, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.length = length
        self.tokens = nn.Embedding(self.symbols, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, layers, self.causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        compute_products_in_fp32(self)

    def forward(self, inputs: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class ByteBERT(ByteGPT):
    """Guesses the bytes behind `MASK` from both sides; shapes as `ByteGPT`."""

    symbols = _BYTES + 1
    causal = False


class Block(nn.Module):
    """Attention and a perceptron, each after a norm of its own and added to the residual stream."""

    def __init__(self, width: int, heads: int, layers: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Linear(width, 4 * width)
        self.perceptron_out = nn.Linear(4 * width, width)
        for linear in (self.attention, self.perceptron):
            nn.init.normal_(linear.weight, std=0.02)
        for linear in (self.attention_out, self.perceptron_out):
            nn.init.normal_(linear.weight, std=0.02 / (2 * layers) ** 0.5)
        for linear in (self.attention, self.attention_out, self.perceptron, self.perceptron_out):
            nn.init.zeros_(linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention_out(self._attend(self.attention(self.attention_norm(hidden))))
        inner = functional.gelu(self.perceptron(self.perceptron_norm(hidden)))
        added: Tensor = hidden + self.perceptron_out(inner)
        return added

    def _attend(self, projected: Tensor) -> Tensor:
        size, length, triple = projected.shape
        split = projected.view(size, length, 3, self.heads, triple // 3 // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        joined: Tensor = mixed.transpose(1, 2).reshape(size, length, triple // 3)
        return joined


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte with a target, in fp32 from the model's logits. Does not synchronise."""
    logits = model(inputs).float()
    loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
    return loss


def compute_products_in_fp32(model: Model) -> Model:
    """Compute each product and attention of the model's calls in fp32 if it is on a CPU; returns `model`.

    Operands in bf16 or fp16 are widened, and the result is rounded to their dtype; gradients likewise. Weights keep
    their dtype. Nothing changes on a device. Does not synchronise.
    """
    model.register_forward_pre_hook(_enter)
    model.register_forward_hook(_leave, always_call=True)
    return model


class _Fp32Products(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function not in _PRODUCTS or not _is_narrow(arguments[0]):
            return function(*arguments, **named)
        operands = _Operands()
        with saved_tensors_hooks(operands.narrowed, _widened):
            wide = function(*operands.widen(arguments), **operands.widen(named))
        return _rounded(wide, arguments[0].dtype)


class _Operands:
    """The operands of one product: widened for it, and saved for the backward pass as they were."""

    def __init__(self) -> None:
        self._originals: dict[int, Tensor] = {}

    def widen(self, value: Any) -> Any:
        """`value` with its narrow tensors, which may be nested in tuples, lists and dictionaries, in fp32."""
        if isinstance(value, Tensor) and _is_narrow(value):
            wide = value.float()
            if wide.stride() == value.stride():
                self._originals[wide.untyped_storage().data_ptr()] = value.detach()
            return wide
        if isinstance(value, tuple | list):
            return type(value)(self.widen(item) for item in value)
        return {name: self.widen(item) for name, item in value.items()} if isinstance(value, dict) else value

    def narrowed(self, saved: Tensor) -> Tensor:
        """The same view of the operand behind `saved`, so that no fp32 copy is kept until the backward pass."""
        original = self._originals.get(saved.untyped_storage().data_ptr())
        if original is None:
            return saved.detach()
        begins = original.storage_offset() + saved.storage_offset()
        return original.as_strided(saved.shape, saved.stride(), begins)


def _is_narrow(value: Tensor) -> bool:
    return value.dtype in _NARROW and value.device.type == "cpu"


def _widened(saved: Tensor) -> Tensor:
    return saved.float() if _is_narrow(saved) else saved


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) else tuple(_rounded(item, dtype) for item in value)


_MODE = _Fp32Products()


def _enter(*_: Any) -> None:
    _MODE.__enter__()  # type: ignore[no-untyped-call]


def _leave(*_: Any) -> None:
    _MODE.__exit__(None, None, None)  # type: ignore[no-untyped-call]
