"""Runs: their records, what happened to them, and their newest numbers."""
