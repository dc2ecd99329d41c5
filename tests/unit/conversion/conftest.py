"""Without waiting for the disk: what these tests check is bytes and order, not that a power cut is survived."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_disk_waits(monkeypatch):
    """Make syncing immediate in this process."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
