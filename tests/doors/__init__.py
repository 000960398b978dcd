"""Trainings of real packages, with and without us: `make doors`. One file a door; see `tests.doors.door`."""
