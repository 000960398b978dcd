"""The demo: one small GPT trained in several precisions, and what its processes share with the studies."""
