"""Fault-tolerant decentralized training that computes what one process would."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Raised whenever peers of the old and the new code must not train together."""
