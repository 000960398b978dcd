"""What a process finds in which Triton is installed, in its interpreter: samples gathered by one launch.

`test_device_gather.py` starts it, because Triton lies apart from the other packages, and its interpreter is chosen
before a kernel is built:

    TRITON_INTERPRET=1 python -m tests.agent.sample.with_triton PART …

PART is a function of this module, and what follows its arguments.
"""

import contextlib
import functools
import random
import re
import sys

import numpy
import pytest
import torch
from collage_agent.sample.sampling import draw as draw_sample
from collage_agent.step import device_gather, gather
from collage_agent.step.gather import BlockLayout, Source, Staging
from collage_optim import CollageAdamW
from collage_optim.device_code import built
from collage_optim.device_step import OPTIONS

from tests.agent.test_watch import Recorder
from tests.agent.training import watched

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]
DTYPES += [torch.int16, torch.uint8, torch.bool, torch.complex64]
"""What weights, gradients and states have been seen in, and some that they have not."""


@contextlib.contextmanager
def kernels():
    """Gathers on this CPU are launches, as on a CUDA device; yields the number of bytes of each launch's words."""
    words = []

    @functools.cache
    def kernel_of(word):
        return built("gather", device_gather.kernel_source(word))

    def noted(device, word):
        words.append(word)
        return kernel_of(word)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "has_kernel", lambda device: True)
        patch.setattr(device_gather, "launches", lambda device: True)
        patch.setattr(device_gather, "_kernel_of", noted)
        yield words


def random_bits(elements, dtype):
    """A flat tensor of any bits, NaN among them."""
    bits = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    return bits % 2 > 0 if dtype == torch.bool else bits.view(dtype)


def somewhere(draw, elements, dtype):
    """Such a tensor at the beginning of memory, or at an element behind."""
    behind = draw.choice((0, 0, 0, 1, 4, 8))
    return random_bits(elements + behind, dtype)[behind:]


def drawn_layout(draw, element_bytes):
    """Weights of some shapes, and the layout of their sample: wholes, parts, ragged ends, many of one shape."""
    cap, start = draw.choice((64, 256, "all")), draw.choice((None, None, 24))
    shapes: list[tuple[int, ...]] = [(draw.randrange(1, 2000),) for _ in range(draw.randrange(1, 6))]
    if draw.random() < 0.5:
        shapes += [(8, 8)] * 20
    weights = [torch.zeros(shape) for shape in shapes]
    if start is None and draw.random() < 0.3:
        weights.append(torch.zeros(4, 8, 3, 3).contiguous(memory_format=torch.channels_last))
    draw.shuffle(weights)
    weights = [torch.zeros(weight.numel() + 31) for weight in weights] if start else weights
    samples = [
        draw_sample(f"w{place}", weight.numel() - (31 if start else 0), element_bytes, cap, start=start)
        for place, weight in enumerate(weights)
    ]
    return weights, BlockLayout(samples, weights)


def law(seed, rounds):
    """Buffers filled by a launch have the bits of those that are filled tensor by tensor."""
    draw = random.Random(int(seed))
    torch.manual_seed(int(seed))
    seen = set()
    for _ in range(int(rounds)):
        with kernels():
            weights, layout = drawn_layout(draw, draw.choice((1, 2, 4)))
        sources = []
        for dtype in draw.choices(DTYPES, k=draw.randrange(1, 4)):
            like = [
                somewhere(draw, weight.numel(), dtype).as_strided(weight.shape, weight.stride())
                for weight in weights
            ]
            sources.append(Source(like, Staging(layout, dtype), draw.random() < 0.5))
        expected = [Staging(layout, source.staging.values.dtype) for source in sources]
        for source, staging in zip(sources, expected, strict=True):
            layout._copy(source.tensors, staging, source.lasting)
            source.staging.values.view(torch.uint8).fill_(7)
        with kernels() as words:
            assert layout.launch(sources) == [True] * len(sources)
        seen.update(words)
        for source, staging in zip(sources, expected, strict=True):
            found = source.staging.values.view(torch.uint8)
            assert torch.equal(found, staging.values.view(torch.uint8)), (source.staging.values.dtype, words)
    assert seen >= {1, 2, 4, 8}, seen


def left_out():
    """Tensors that are not dense, of another dtype or size, or without memory are gathered as without a kernel."""
    weights = [torch.randn(300), torch.randn(8, 8)]
    with kernels():
        layout = BlockLayout([draw_sample("a", 300, 4, 64), draw_sample("b", 64, 4, 64)], weights)
        strided, dense, unlike = (Staging(layout, torch.float32) for _ in range(3))
        columns = [
            ([weights[0], weights[1].t()], strided),
            (weights, dense),
            ([weights[0].double(), weights[1].double()], unlike),
            ([weights[0][:200], weights[1]], unlike),
            ([weights[0], weights[1].to("meta")], unlike),
        ]
        launched = layout.launch([Source(*column, False) for column in columns])
        assert launched == [False, True, False, False, False]
        layout.gather([weights[0], weights[1].t()], strided, lasting=False)
        with pytest.raises(RuntimeError, match="should be positive"):
            layout.gather([weights[0][:0], weights[1]], unlike, lasting=False)
    assert numpy.array_equal(strided.values[:64], dense.values[:64])
    assert torch.equal(strided.values[64:], weights[1].t().reshape(-1))
    assert not unlike.values.any()


def reported(make, oracle):
    """Totals of three measured steps."""
    recorder = Recorder()
    _, _, handle = watched(make, sample=128, oracle=oracle, steps=3, reporter=recorder)
    handle.remove()
    return [measurement.totals for measurement in recorder.measurements]


def totals():
    """A watch reports the same numbers, bit by bit, and a measured step takes two launches; an oracle one more."""
    for oracle, make in (
        (False, functools.partial(torch.optim.AdamW, lr=1e-3)),
        (True, functools.partial(CollageAdamW, lr=1e-3, strategy="split-master-8bit", seed=1)),
    ):
        expected = reported(make, oracle)
        with kernels() as words:
            found = reported(make, oracle)
        assert len(words) == 3 * (2 + oracle)
        assert len(expected) == len(found) == 3
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0)), make


def ahead(word):
    """For devices of several makes a kernel's code moves words of its size, without a spill."""
    from triton import compile as compile_ahead
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = built("gather", device_gather.kernel_source(int(word)))
    signature, aligned = dict.fromkeys(kernel.arg_names, "*i64"), [["tt.divisibility", 16]]
    attributes = {(place,): aligned for place in range(len(kernel.arg_names))}
    source = ASTSource(fn=kernel, signature=signature, constexprs={}, attrs=attributes)
    for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
        code = compile_ahead(source, target=target, options=dict(OPTIONS)).asm
        if target.backend == "cuda":
            assert set(re.findall(r"st\.global\.b(\d+)", code["ptx"])) == {str(8 * int(word))}
            assert ".local" not in code["ptx"], "nothing is spilt"


if __name__ == "__main__":
    part, *arguments = sys.argv[1:]
    globals()[part](*arguments)
