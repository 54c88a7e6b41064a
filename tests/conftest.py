"""What all tests share.  Markers, and warnings as errors, are set in pyproject.toml."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, and for the processes that tests start: several threads on few cores fight each other.
os.environ["OMP_NUM_THREADS"] = "1"
# Text of children reaches us at once, and looks the same on any terminal.
os.environ.update({"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"})
os.environ.pop("FORCE_COLOR", None)

# Examples are the same in every run: a failure seen once is seen again.  No deadline: machines are shared.
settings.register_profile(
    "swarm", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("swarm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test says how long it takes, so that these three are all there is."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("fast", "simulated", "swarm")):
            raise pytest.UsageError(f"{item.nodeid}: mark it fast, simulated or swarm")
