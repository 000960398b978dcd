"""The agent's verbs of `collage-monitor`: audit, convert, doctor, replay."""
