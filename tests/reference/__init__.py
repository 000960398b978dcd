"""References computed another way: exact rationals and fp64, written from the definitions alone."""
