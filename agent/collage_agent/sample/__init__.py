"""The sample: which elements of a tensor are looked at, how they are gathered, and what kept tensors stand for."""
