"""Measured steps of one optimizer: the meter, whole tensors in rotation, one table."""
