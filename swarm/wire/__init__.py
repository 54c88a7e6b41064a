"""The wire: protobuf contract, framing of tensors, and values <-> messages with every field checked."""

PROTOCOL_VERSION = 1
"""Version of the contract in proto/swarm/wire/v1; peers of another version are refused."""
