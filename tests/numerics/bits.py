"""Tensors from bit patterns and back, for tests that speak in hexadecimal."""

import torch

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def from_bits(patterns, dtype):
    """A tensor of `dtype` from hexadecimal strings or integers."""
    values = [int(pattern, 16) if isinstance(pattern, str) else pattern for pattern in patterns]
    width = torch.tensor([], dtype=dtype).element_size() * 8
    signed = [value - (1 << width) if value >> (width - 1) else value for value in values]
    return torch.tensor(signed, dtype=INTEGERS[dtype]).view(dtype)


def to_bits(tensor):
    """The patterns of a tensor as unsigned integers."""
    width = tensor.element_size() * 8
    return [value & ((1 << width) - 1) for value in tensor.reshape(-1).view(INTEGERS[tensor.dtype]).tolist()]


def to_hexadecimal(*tensors):
    """The pattern of each one-element tensor; -0 is written as 0."""
    return [f"{to_bits(torch.where(tensor == 0, 0, tensor))[0]:04x}" for tensor in tensors]


def finite_patterns(dtype):
    """All finite numbers of a 16-bit dtype."""
    everything = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return everything[torch.isfinite(everything)]


def random_finite(dtype, count, generator):
    """Numbers with uniformly random finite bit patterns: every exponent is as likely as any other."""
    everything = finite_patterns(dtype)
    return everything[torch.randint(everything.numel(), (count,), generator=generator)]
