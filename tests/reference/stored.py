"""What an optimizer's state stands for, from the formats' definitions and not from the code that writes them."""

import numpy as np
import torch

BLOCK = 128


def reference_value(state, name, high=None):
    """The value kept under `name` as fp64, of the state's shape; `high` is the weight for "parameter"."""
    packed = name == "exp_avg_sq" and name not in state
    first = (state["exp_avg" if packed else name] if high is None else high).detach()
    low, scale = state.get(f"{name}_low"), state.get(f"{name}_scale")
    if scale is not None and name == "exp_avg" and first.dtype == torch.int16:
        # Six bits, two's complement; all sixteen are the second moment's.
        code = (first.flatten().numpy().astype(np.int64) + 32) % 64 - 32
        share = np.sign(code) * (code / 31) ** 2
        return torch.from_numpy(share * np.repeat(scale.double().numpy(), BLOCK)[: code.size]).view(first.shape)
    if scale is not None:
        return torch.from_numpy(_blocks(first.flatten().numpy(), scale.double().numpy())).view(first.shape)
    if first.dtype == torch.int16:
        return torch.from_numpy(_root(first.numpy().astype(np.int64) & 0xFFFF) ** 2)
    if low is None:
        return first.double()
    if low.dtype.is_floating_point:
        return first.double() + low.double()
    return torch.from_numpy(_split(first, low)).double()


def _split(high, low):
    """TransformerEngine's reading: one less above where what is below is negative, then the bits side by side."""
    bits = 8 * low.element_size()
    upper = high.view(torch.int16).numpy().astype(np.int64) & 0xFFFF
    below = low.numpy().astype(np.int64)
    upper = np.where(below < 0, upper - 1, upper)
    joined = (upper << 16) | ((below & (2**bits - 1)) << (16 - bits))
    return (joined & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def _root(code):
    """Exponent, biased by 64, and mantissa: ten bits of it in the 40 powers from 2^-32 on, elsewhere eight.

    At the least exponent underflow is gradual.
    """
    below, above = code < 8192, code >= 8192 + 40 * 1024
    exponent = np.where(below, code >> 8, np.where(above, (code - 49152 >> 8) + 72, (code - 8192 >> 10) + 32))
    mantissa = np.where(below | above, (code & 255) / 256, (code & 1023) / 1024)
    return np.where(exponent > 0, 2.0 ** (exponent - 64.0) * (1 + mantissa), 2.0**-63 * mantissa)


def _blocks(code, scale):
    signed = code.dtype == np.int8
    if code.dtype == np.int16:
        code = code.view(np.uint16)
    share = (code / (127 if signed else np.iinfo(code.dtype).max)) ** 2 * np.sign(code)
    value = share * np.repeat(scale, BLOCK)[: code.size]
    return value if signed else value**2
