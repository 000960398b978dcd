"""Windows: u added up over bursts of consecutive steps, against what the weights have moved by since."""

from collage_agent.windows.schedule import Schedule, Span
from collage_agent.windows.windows import Windows

__all__ = ["Schedule", "Span", "Windows"]
