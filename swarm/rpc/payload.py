"""Payload: tensors as a stream of frames, out and in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator

import numpy as np

from swarm.errors import BadRequest
from swarm.tensors import Buffer, TensorData, TensorSpec
from swarm.wire import frames
from swarm.wire.frames import CHUNK_BYTES, Frame
from swarm.wire.v1 import stage_pb2 as pb

Reader = Callable[[], Awaitable[bytes | None]]
"""Gives the next message of a stream, None at its end."""


def outgoing(meta: pb.Frame, tensors: tuple[TensorData, ...]) -> Iterator[bytes]:
    """Frames of one message.  What fits in one chunk travels with the head; more follows in frames of its own.

    Nothing waits for an answer to the head: a refusal comes amid the data, and flow control bounds what was sent till
    then.
    """
    total = sum(len(tensor.data) for tensor in tensors)
    if total <= CHUNK_BYTES:
        yield frames.encode(meta, b"".join(tensor.data for tensor in tensors))
        return
    yield frames.encode(meta, b"")
    for tensor in tensors:
        yield from stream(tensor.data)


def stream(data: Buffer) -> Iterator[bytes]:
    """Frames of data only."""
    for chunk in frames.chunks(data):
        yield frames.encode(None, chunk)


async def collect(first: Frame, specs: Iterable[TensorSpec], read: Reader) -> tuple[TensorData, ...]:
    """Read exactly the data that ``specs`` declare, up to the end of the stream.

    Tensors that came within ``first`` are views of it, read-only; others share one new buffer, whose pages are taken
    as data arrives.  Raises BadRequest on too few or too many bytes and on frames with anything but data.
    """
    wanted = tuple(specs)
    total = sum(spec.nbytes for spec in wanted)
    buffer = first.data
    filled = len(buffer)
    if filled > min(total, CHUNK_BYTES):
        raise BadRequest(f"data: {filled} bytes in the first frame, of {total}")
    if filled < total:
        buffer = np.empty(total, np.uint8).data
        buffer[:filled] = first.data
    while (message := await read()) is not None:
        chunk = data_of(message)
        if len(chunk) > total - filled:
            raise BadRequest(f"data: more than the declared {total} bytes")
        buffer[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    if filled < total:
        raise BadRequest(f"data: {filled} bytes, not the declared {total}")
    tensors = []
    start = 0
    for spec in wanted:
        tensors.append(TensorData(spec=spec, data=buffer[start : start + spec.nbytes]))
        start += spec.nbytes
    return tuple(tensors)


def data_of(message: bytes) -> memoryview:
    """Data of a frame after the first.  Raises BadRequest if there is anything else, nothing, or too much of it."""
    frame = frames.decode(message)
    if frame.meta is not None or not 0 < len(frame.data) <= CHUNK_BYTES:
        raise BadRequest(f"data frame: {len(frame.data)} bytes{'' if frame.meta is None else ' and a head'}")
    return frame.data
