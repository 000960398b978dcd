"""Tensors that are stepped alike, measured as one flat sample: from gathered values to estimated totals."""
