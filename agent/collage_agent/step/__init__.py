"""Measured steps of one optimizer: what is fixed at the plan, gathered around the step, and made of it."""
