"""The kernels of steps, compiled ahead for devices that are not here: what their code is, nothing of it is run.

Triton compiles a kernel to a device's assembly and, with the assembler that it brings along, to machine code:

    python -m tests.optim.triton_code TARGET RULE STRATEGY …

prints one line of JSON for each strategy, after which + and a form may stand (`compiled_ahead`). `test_triton.py`
starts it, because Triton lies apart from the other packages.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from collage_optim import CollageAdamW, CollageLion, CollageSGD
from collage_optim.device_code import CHUNK_ELEMENTS, built
from collage_optim.device_step import OPTIONS, OPTIONS_OF_TOTALS, WARPS, step_source
from collage_optim.strategies import strategy_named
from triton.backends.compiler import GPUTarget

ALIGNED = 16
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
RULES = {"AdamW": CollageAdamW, "Lion": CollageLion, "SGD": CollageSGD}
_POINTED = {"sizes": "*i64", "sources": "*i32", "chunks": "*i32", "scalars": "*fp32", "turned": "*i32"}
_POINTED |= {"exact": "*fp64", "rows": "*fp64"}
_BITS = {"b8": 8, "b16": 16, "b32": 32, "b64": 64}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compiled_ahead(rule, strategy, target, form):
    """The kernel of a bfloat16 step of tensors whose addresses and sizes are all aligned, and its counts.

    form: "totals", which it adds up; "step", which does not, with as many threads; "", as it is launched.
    """
    optimizer = RULES[rule]([torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))], strategy=strategy, seed=1)
    group = optimizer.param_groups[0]
    step = optimizer._step(group, strategy_named(strategy), False, 1, torch.bfloat16, torch.device("cpu"))
    with_totals, names = step_source(step, torch.bfloat16, adds=True)
    kernel = built("step", with_totals if form == "totals" else step_source(step, torch.bfloat16)[0])
    signature = {name: _POINTED.get(name, "*i64") for name in kernel.arg_names} | {"ALIGNED": "constexpr"}
    pointers = [(place,) for place, name in enumerate(kernel.arg_names) if name != "ALIGNED"]
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={"ALIGNED": ALIGNED},
        attrs={place: [["tt.divisibility", ALIGNED]] for place in pointers},
    )
    made = triton.compile(source, target=TARGETS[target], options=dict(OPTIONS_OF_TOTALS if form else OPTIONS))
    return made, {"numbers": len(step.scalars), "sums": len(names)}


def moved(ptx, instruction, lanes):
    """Bytes that all threads move by a kind of access, and the narrowest access of a thread, in bytes.

    The accesses that are the same for all threads, of tables and numbers, are not counted: they are no vectors, and
    neither are the scales of blocks, one for each block.
    """
    found = re.findall(rf"{instruction}\.global\S*?\.v(\d)\.(b\d+)", ptx)
    sizes = [int(length) * _BITS[kind] // 8 for length, kind in found]
    return sum(sizes) * WARPS * lanes, min(sizes)


def described(kernel, target):
    """What a kernel's code says of itself, as JSON can hold it."""
    if target.startswith("gfx"):
        assembly = kernel.asm["amdgcn"]
        spilt = re.findall(r"\.[sv]gpr_spill_count: +(\d+)", assembly)
        (registers,) = re.findall(r"\.vgpr_count: +(\d+)", assembly)
        return {"spilt_bytes": sum(map(int, spilt)), "registers": int(registers)}
    ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = [str(_TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", usage)}
    loaded, stored = (moved(ptx, instruction, 32) for instruction in ("ld", "st"))
    return {
        "assembly": ptx,
        "loads": len(re.findall(r"ld\.global", ptx)),
        "stores": len(re.findall(r"st\.global", ptx)),
        "machine_code_bytes": len(cubin),
        "registers": numbers["REG"],
        "spilt_bytes": numbers["STACK"] + numbers["LOCAL"],
        "loaded_bytes": loaded[0] / CHUNK_ELEMENTS,
        "stored_bytes": stored[0] / CHUNK_ELEMENTS,
        "narrowest_bytes": min(loaded[1], stored[1]),
    }


if __name__ == "__main__":
    target_given, rule_given, *strategies = sys.argv[1:]
    for strategy_given in strategies:
        name_given, _, form_given = strategy_given.partition("+")
        kernel_made, sizes = compiled_ahead(rule_given, name_given, target_given, form_given)
        sys.stdout.write(json.dumps(described(kernel_made, target_given) | sizes) + "\n")
