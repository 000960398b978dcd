"""Measured steps of one optimizer: the plan, the values gathered around a step, and the totals made from them."""
