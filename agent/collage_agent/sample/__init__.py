"""The sample: which elements of a tensor are looked at, and what kept tensors stand for."""
