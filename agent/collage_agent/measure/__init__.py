"""Measured steps of one optimizer: which tensors are stepped alike, oracles, rotation, and one table of all."""
