"""The wire: protobuf contract, framing of tensors, and values <-> messages with every field checked."""
