"""Without waiting for the disk: what these tests check is bytes and order, not that a power cut is survived. And `shapes` on demand."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_disk_waits(monkeypatch):
    """Make syncing immediate in this process."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


def pytest_collection_modifyitems(config, items):
    """Leave out the matrix of published shapes, unless the mark is asked for by name."""
    if "shapes" in config.option.markexpr:
        return
    large = [item for item in items if item.get_closest_marker("shapes")]
    items[:] = [item for item in items if item not in large]
    config.hook.pytest_deselected(items=large)
