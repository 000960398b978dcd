"""The arithmetic of low precision, `collage_optim.numerics`, under the agent's name."""

from collage_optim.numerics import *  # noqa: F403
from collage_optim.numerics import __all__ as __all__
