"""Mirrors: a run's few numbers in the tracker that a team already looks at, beside what the training logs there."""
