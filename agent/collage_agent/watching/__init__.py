"""Behind `watch`: the hooks on an optimizer, iterations, the CPU budget, the description and the verdict."""
