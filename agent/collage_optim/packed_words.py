"""Four elements to a word: how a compiled step reads and writes 8 and 16 bits on a CPU.

Inductor has no vectors for 16-bit integers. Beside integers it loads and stores bfloat16 16 at a time under a mask:
such a load waits for the store before it, which takes more than half of a step. Words of four elements go whole.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_optim.arithmetic import State

__all__ = ["ELEMENTS", "packed", "unpacked", "words"]

ELEMENTS = 4
_ALIGNMENT_BYTES = 8
_PACKED = {torch.bfloat16, torch.int16, torch.int8}


def words(components: State) -> State:
    """Flat vectors [4 n] of bfloat16, int16 or int8 as words [n], int32 or int64; those that lie between words are
    copied. Others, such as an fp32 gradient of a bfloat16 weight, as rows of four: [n, 4], as they are.
    """
    found = {}
    for name, tensor in components.items():
        if tensor.dtype not in _PACKED:
            found[name] = tensor.view(-1, ELEMENTS)
            continue
        width = tensor.element_size()
        aligned = tensor if tensor.storage_offset() * width % _ALIGNMENT_BYTES == 0 else tensor.clone()
        found[name] = aligned.view(torch.int32 if width == 1 else torch.int64)
    return found


def unpacked(word: Tensor, place: int, dtype: torch.dtype) -> Tensor:
    """The element of `dtype` in this place of each word, 0 to 3: bfloat16 as fp32, int16 as int32, int8 as such; of
    rows as it is.
    """
    if word.dim() == 2:
        return word[:, place]
    if dtype == torch.int8:
        return (word << 24 - 8 * place >> 24).to(torch.int8)
    upper = (word >> 16 * place).to(torch.int32) << 16
    return upper >> 16 if dtype == torch.int16 else upper.view(torch.float32)


def packed(elements: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The words of these elements, as `unpacked` returns them: an integer's lower bits, an fp32's upper ones."""
    if dtype == torch.bfloat16:
        elements = [element.to(torch.float32).view(torch.int32) >> 16 for element in elements]
    first, second, third, fourth = (element.to(torch.int32) for element in elements)
    if dtype == torch.int8:
        return first & 0xFF | (second & 0xFF) << 8 | (third & 0xFF) << 16 | fourth << 24
    lower, upper = first & 0xFFFF | second << 16, third & 0xFFFF | fourth << 16
    return lower.to(torch.int64) & 0xFFFFFFFF | upper.to(torch.int64) << 32
