"""Trainer, lead and peer as plain async code over ports; no grpc, hivemind, torch or wall clock."""
