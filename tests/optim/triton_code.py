"""The Triton code of a compiled step for CUDA, compiled ahead for a device's capability: no device is needed.

The step is traced on the host, its graph moved to a CUDA device that exists in name only, and inductor asked for
the code. Triton compiles that to PTX and, with the assembler that it brings along, to machine code. This is done in
a process of its own, because the compiler remembers whether there was a device:

    python -m tests.optim.triton_code FOLDER MAJOR STRATEGY

writes FOLDER/STRATEGY.json, one entry a kernel.
"""

import contextlib
import json
import re
import runpy
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from collage_optim import CollageAdamW, compiled
from collage_optim.strategies import strategy_named
from torch._functorch.aot_autograd import aot_function
from torch._inductor import config
from torch._inductor.compile_fx import _recursive_post_grad_passes
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.backends.compiler import GPUTarget

ELEMENTS = 1 << 16
"""Of the tensor that is stepped: whole vectors, as most have."""
ELEMENTS_OF_A_BLOCK, WARPS, LANES = 1024, 4, 32
_INTERFACE = "torch._dynamo.device_interface.CudaInterface"
_HEAD = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""
_DEVICE = {
    "name": "a device in name only",
    "minor": 0,
    "multi_processor_count": 108,
    "regs_per_multiprocessor": 65_536,
    "max_threads_per_multi_processor": 2_048,
    "max_threads_per_block": 1_024,
    "warp_size": LANES,
    "total_memory": 80 << 30,
}


@dataclass(frozen=True)
class Kernel:
    """One kernel: its PTX, the size of its machine code, and the bytes that it moves for each element."""

    ptx: str
    machine_code_bytes: int
    loaded_bytes: float
    stored_bytes: float


def bytes_an_element(ptx, instruction):
    """Bytes that a thread moves by vectors of "ld" or "st", for each of its elements.

    What is the same for all elements, the hyper-parameters, is no vector.
    """
    found = re.findall(rf"{instruction}\.global\.v(\d)\.b(\d+)", ptx)
    return sum(int(length) * int(bits) // 8 for length, bits in found) / (ELEMENTS_OF_A_BLOCK / WARPS / LANES)


def structure_of(strategy, device_type="cuda"):
    """An AdamW step of bfloat16 weights under a strategy."""
    optimizer = CollageAdamW([torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))], strategy=strategy, seed=1)
    group = optimizer.param_groups[0]
    rule = optimizer.rule_of(group)
    names = tuple(rule.scalars(group, 1))
    kept = strategy_named(strategy)
    return compiled.Structure(rule, kept, rule.moments(group), False, torch.bfloat16, device_type, names)


def kernels(strategy, major, folder):
    """The kernels of a step under a strategy, for devices of capability `major`.0."""
    code = _code(strategy, major)
    found = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", code, re.S)
    assert found
    return [_compiled(name, source, major, folder) for name, source in found]


def _code(strategy, major):
    structure = structure_of(strategy)
    components = compiled._components(structure_of(strategy, "cpu"))
    advance = compiled._uncompiled(structure, torch.float64)
    made = []

    def step(packed, numbers, *tensors):
        drawn = numbers if structure.strategy.stochastic else None
        advance(dict(zip(components, tensors, strict=True)), packed, drawn)

    mode = FakeTensorMode()

    def compiler(graph, inputs):
        made.append(_generated(graph, inputs, mode, major))
        return lambda *arguments: None

    with mode, torch.no_grad(), config.patch(compiled.compiler_options("cuda")):
        arguments = [torch.empty(len(structure.scalar_names)), torch.empty(3, dtype=torch.int32)]
        arguments += [torch.empty(ELEMENTS, dtype=tensor.dtype) for tensor in components.values()]
        traced = aot_function(
            step, compiler, decompositions=select_decomp_table(), keep_inference_input_mutations=True
        )
        traced(*arguments)
    return made[0]


def _generated(graph, inputs, mode, major):
    """Inductor's code for a graph that was traced on the host, as of a CUDA device."""
    device = torch.device("cuda", 0)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
    moved = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in inputs]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
    properties = SimpleNamespace(major=major, **_DEVICE)
    with contextlib.ExitStack() as stack:
        stack.enter_context(V.set_fake_mode(mode))
        _recursive_post_grad_passes(graph, is_inference=True)
        lowering = GraphLowering(graph, example_inputs=moved, is_inference=True)
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        for name, value in {
            f"{_INTERFACE}.get_device_properties": properties,
            f"{_INTERFACE}.Worker.get_device_properties": properties,
            "torch.cuda.get_device_properties": properties,
            "torch.cuda.get_device_capability": (major, 0),
            "torch.cuda.current_device": 0,
            "torch.cuda.device_count": 1,
            "torch.cuda.is_available": True,
            "torch.utils._triton.triton_hash_with_backend": "none",
        }.items():
            stack.enter_context(mock.patch(name, return_value=value))
        lowering.run(*moved)
        code = lowering.codegen()[0]
    return getattr(code, "value", code)


def _compiled(name, source, major, folder):
    (described,) = re.findall(r"triton_meta=(\{.*\}),\n", source)
    meta = eval(described, {"DeviceProperties": dict})
    path = folder / f"{name}_{major}.py"
    path.write_text(_HEAD + source[source.index("@triton.jit") :], encoding="utf-8")
    kernel = triton.compiler.ASTSource(
        fn=runpy.run_path(str(path))[name],
        signature=meta["signature"],
        constexprs={"XBLOCK": ELEMENTS_OF_A_BLOCK},
        attrs=meta["configs"][0],
    )
    options = {
        "num_warps": WARPS,
        "enable_fp_fusion": meta["enable_fp_fusion"],
        "enable_reflect_ftz": not meta["disable_ftz"],
    }
    made = triton.compile(kernel, target=GPUTarget("cuda", 10 * major, LANES), options=options)
    ptx = made.asm["ptx"]
    return Kernel(ptx, len(made.asm["cubin"]), bytes_an_element(ptx, "ld"), bytes_an_element(ptx, "st"))


if __name__ == "__main__":
    target, major_given, strategy_given = sys.argv[1:]
    made_kernels = kernels(strategy_given, int(major_given), Path(target))
    entries = json.dumps([asdict(kernel) for kernel in made_kernels])
    (Path(target) / f"{strategy_given}.json").write_text(entries, encoding="utf-8")
