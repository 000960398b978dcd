"""Behind `watch`: the hooks on an optimizer, iterations, the budget, and what people are told about a watch."""
