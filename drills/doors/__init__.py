"""Trainings of real packages, with and without us: `make doors`. One file a door; see `drills.doors.door`."""
