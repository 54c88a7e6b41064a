"""Messages as a hostile program would write them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from swarm.messages import Greeting
from swarm.wire import heads
from swarm.wire.v1 import stage_pb2 as pb
from tests.stage_double import (
    RUN,
    TERM,
    forward_request,
    tensor,
)

GREETING = Greeting(run=RUN, term=TERM)


GOOD = forward_request(tensor(bytes(2 * 3 * 8 * 4), "float32", (2, 3, 8)))


HEAD = heads.to_forward(GOOD)


DATA = bytes(GOOD.inputs.data)


METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Stage"].methods]


class Planted:
    """Its pickle runs code when it is read."""

    def __reduce__(self) -> tuple[Callable[..., NoReturn], tuple[str]]:
        return _fired, ("unpickled",)


def _fired(text: str) -> NoReturn:
    raise SystemExit(text)


def run(main: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(limited())


def declared(*shapes: tuple[int, ...], dtype: int = pb.DTYPE_FLOAT32) -> pb.Frame:
    """The head of a good forward that declares other tensors."""
    meta = pb.Frame(forward=HEAD.forward)
    for shape in shapes:
        spec = meta.tensors.add()
        spec.shape.extend(shape)
        spec.MergeFromString(b"\x08" + bytes([dtype]))
    return meta
