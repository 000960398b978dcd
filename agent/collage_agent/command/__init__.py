"""The agent's verbs of `collage-monitor`: run, audit, doctor, replay."""
