"""The demo: one small GPT trained in several precisions, and the code that its processes share with the studies."""
