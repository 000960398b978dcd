"""Measured steps of an optimizer: its buckets, whole tensors in rotation or from inside the step, and their one table."""
