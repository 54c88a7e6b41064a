"""Scan: the top-level fields of a serialised protobuf message, found without parsing it.

Protobuf takes up to 100 bytes of memory for an entry of two on the wire; what has too many is refused before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarm.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Field:
    """``begin`` is where the tag is, ``start`` and ``stop`` bound the value."""

    number: int
    wire_type: int
    begin: int
    start: int
    stop: int


def scan(view: memoryview) -> Iterator[Field]:
    """Fields in order.  Raises BadRequest where the message cannot be followed: malformed, or a group.

    Groups are legal protobuf that no message of ours has; an unseen one would hide all that follows it.
    """
    position, size = 0, len(view)
    while position < size:
        begin = position
        tag, position = _varint(view, position, 5)
        wire_type, start = tag & 7, position
        if wire_type == 0:
            _, position = _varint(view, position, 10)
        elif wire_type == 2:
            length, start = _varint(view, position, 10)
            position = start + length
        elif wire_type in (1, 5):
            position += 8 if wire_type == 1 else 4
        else:
            raise BadRequest("malformed protobuf, or a group")
        if position > size:
            raise BadRequest("malformed protobuf")
        yield Field(tag >> 3, wire_type, begin, start, position)


def more_fields_than(data: bytes, most: int) -> bool:
    """Whether ``data`` has more top-level fields.  Time and memory are bounded by ``most``.

    Raises BadRequest if it cannot be told.
    """
    if len(data) <= 2 * most:
        return False
    return any(index >= most for index, _ in enumerate(scan(memoryview(data))))


def _varint(view: memoryview, position: int, most: int) -> tuple[int, int]:
    """Value and the position after it; a position past the end if it is cut off or longer than ``most`` bytes."""
    value = 0
    for index in range(min(most, len(view) - position)):
        byte = view[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    return 0, len(view) + 1
