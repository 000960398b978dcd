"""Megatron-Core: a replica holds its inner optimizer, its shards and its CUDA graph."""

from drills.doors.door import Door

DOOR = Door(
    package="megatron-core",
    version="0.19.2",
    lines="`collage-monitor run -- python pretrain_gpt.py`; with a CUDA graph `before()`, `after()`",
    seen="the inner optimizer, by the weights' names; replayed steps are named; not the loss",
    held_by="tests/loops/test_unseen.py",
    cannot="it needs Python 3.12, and its optimizer in bf16 a CUDA device",
)
