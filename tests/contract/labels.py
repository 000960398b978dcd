"""A label of each kind, for keys of labelled statistics and metrics."""

__all__ = ["LABELS", "key_of"]

LABELS = {
    "octave": "-3",
    "state": "exp_avg_sq",
    "metric": "edq_ratio",
    "steps": "64",
    "method/dtype": "light/bf16",
    "format": "mxfp8",
    "format/steps": "mxfp8/64",
    "routes": "fp8_block128/bf16>fp8_block128",
}


def key_of(entry):
    """The key of a statistic or a metric."""
    return f"{entry.name}/{LABELS[entry.label]}" if entry.label else entry.name
