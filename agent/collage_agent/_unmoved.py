"""Loads the HTTP client without moving Python's random numbers: what it imports draws from them once.

A program that seeds first and imports the agent later must see the numbers that it would see without the agent.
"""

import random

_state = random.getstate()

import httpx  # noqa: E402

random.setstate(_state)

__all__ = ["httpx"]
