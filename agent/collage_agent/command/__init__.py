"""Verbs of `collage-monitor` that the agent brings."""
