"""The optimizers, `collage_optim`, under the agent's name."""

from collage_optim import *  # noqa: F403
from collage_optim import __all__ as __all__
