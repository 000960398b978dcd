"""Measured steps of one optimizer: the meter, whole tensors in rotation or from inside the step, one table."""
