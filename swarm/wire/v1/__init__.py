"""Generated from proto/swarm/wire/v1."""
