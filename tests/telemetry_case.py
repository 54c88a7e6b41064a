"""A clock for what is shown."""

from __future__ import annotations


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


# --- words ------------------------------------------------------------------------

A, B = "12D3KooW" + "x" * 40 + "3f2a", "12D3KooW" + "y" * 40 + "9c41"
