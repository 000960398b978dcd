"""Packages of the development environment: `make test` itself trains with the real ones."""

from drills.doors.door import Door

DOORS = [
    Door(
        package="transformers",
        version="5.23.0",
        lines='`callbacks=[CollageCallback("my-project")]`',
        seen="the optimizer, all that the trainer logs",
        held_by="tests/integrations/test_transformers.py",
    ),
    Door(
        package="lightning",
        version="2.6.6",
        lines='`callbacks=[CollageCallback("my-project")]`',
        seen="every optimizer, all that `self.log` records",
        held_by="tests/integrations/test_lightning.py",
    ),
    Door(
        package="accelerate",
        version="1.15.0",
        lines='`log_with=CollageTracker("my-project")`, `watch_accelerated(accelerator, model, optimizer)`',
        seen="the optimizer, all that `accelerator.log` records",
        held_by="tests/integrations/test_accelerate.py",
    ),
]
