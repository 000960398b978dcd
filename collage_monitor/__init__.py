"""The contract that agent, server and dashboard share: names, merge rules, finishing functions, wire."""

__version__ = "0.1.0"
