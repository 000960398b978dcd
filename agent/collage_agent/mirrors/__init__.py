"""Mirrors: a few numbers of a run in the team's own tracker, beside the training's values."""
