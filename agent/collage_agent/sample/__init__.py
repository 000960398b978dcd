"""The sample: which elements of a tensor are measured, and how stored tensors are decoded."""
