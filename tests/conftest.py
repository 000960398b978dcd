"""Fixtures and rules for every test."""

import pytest


def pytest_collection_modifyitems(items):
    """A CUDA test says why it is skipped where there is no device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
