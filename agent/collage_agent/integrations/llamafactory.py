"""LLaMA-Factory: its training with the Hugging Face callback, from the same YAML file and arguments.

python -m collage_agent.integrations.llamafactory train.yaml       # for: llamafactory-cli train train.yaml
torchrun --nproc-per-node 8 -m collage_agent.integrations.llamafactory train.yaml
"""

from __future__ import annotations

from collage_agent.integrations.attachment import needs
from collage_agent.integrations.transformers import CollageCallback

try:
    from llamafactory.train.tuner import run_exp
except ImportError as error:
    raise needs("llamafactory", error) from error

__all__ = ["main"]


def main() -> None:
    """Train as the arguments of the process say. The variables of the environment say where to report."""
    run_exp(callbacks=[CollageCallback()])


if __name__ == "__main__":
    main()
