"""Axolotl: a replica holds its plugin."""

from drills.doors.door import Door

DOOR = Door(
    package="axolotl",
    version="0.21.0",
    lines="`plugins: [collage_agent.integrations.axolotl.CollagePlugin]` in its YAML",
    seen="the optimizer, all that the trainer logs",
    held_by="tests/integrations/test_hugging_face_house.py",
    cannot="it needs Python 3.12",
)
