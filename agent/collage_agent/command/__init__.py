"""The agent's verbs of `collage-monitor`: run, doctor, audit."""
