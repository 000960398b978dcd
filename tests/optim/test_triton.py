"""What compiled steps are on CUDA devices of two generations, read from their code: nothing of it is run."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from collage_optim import CollageAdamW

from tests.optim.test_compiled import BY_WORDS
from tests.waiting import PATIENCE_SECONDS

PLATFORM = (platform.system(), platform.machine())
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(PLATFORM != ("Linux", "x86_64"), reason="Triton is published for Linux on x86-64"),
]


@pytest.mark.parametrize("strategy", ["plus", *BY_WORDS])
@pytest.mark.parametrize("major", [8, 9], ids=["sm_80", "sm_90"])
def test_each_component_is_moved_once_and_rounded_as_in_eager_steps(major, strategy, tmp_path):
    command = [sys.executable, "-m", "tests.optim.triton_code", tmp_path, str(major), strategy]
    apart = Path(sys.prefix, "triton")
    assert apart.is_dir(), "Triton lies apart from the other packages: make .venv/.stamp-dev puts it there"
    paths = os.pathsep.join(filter(None, (str(apart), os.environ.get("PYTHONPATH"))))
    subprocess.run(command, check=True, timeout=PATIENCE_SECONDS, env={**os.environ, "PYTHONPATH": paths})
    kernels = json.loads((tmp_path / f"{strategy}.json").read_text(encoding="utf-8"))
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = CollageAdamW([weight], strategy=strategy, seed=1)
    optimizer.step()
    kept = [tensor.element_size() for name, tensor in optimizer.state[weight].items() if name != "step"]
    stored = weight.element_size() + sum(kept)
    assert sum(kernel["stored_bytes"] for kernel in kernels) == stored
    assert sum(kernel["loaded_bytes"] for kernel in kernels) == stored + weight.grad.element_size()
    for kernel in kernels:
        ptx = kernel["ptx"]
        assert kernel["machine_code_bytes"] > 0
        assert f".target sm_{major}0" in ptx
        assert re.search(r"div\.rn\.f32", ptx), "quotients are rounded to nearest"
        assert not re.search(r"\.approx|\.full|\.ftz", ptx), "nothing is approximated or flushed to zero"
