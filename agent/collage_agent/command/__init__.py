"""The agent's verbs of `collage-monitor`: audit, convert, cure, doctor, sync."""
