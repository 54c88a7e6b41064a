"""The life of a program's process: logging, one asyncio loop, signals, exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import warnings
from collections.abc import Coroutine
from typing import Any

from swarm.errors import ExitCode
from swarm.telemetry import logs

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def prepare() -> None:
    """Logging to standard error, and no noise from imports."""
    logs.configure(logging.INFO)
    # Two deprecations inside hivemind's own imports that nobody here can act on.
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.script` is deprecated", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=r"path is deprecated\. Use files\(\)", category=DeprecationWarning)


def _hold_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _take_no_part() -> None:
    """End by signals as usual again, in a process that a user's code forks (data loaders, say).

    It inherits the loop's handlers, which end nothing there, and the pipe by which they tell the loop: a worker that
    is told to end would go on, and have its parent believe that it was told to.
    """
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _let_signals_in()


def run(main: Coroutine[Any, Any, None], *, on_sigterm: ExitCode) -> ExitCode:
    """Run ``main`` to its end.  SIGINT cancels it (130), SIGTERM and SIGHUP as well (``on_sigterm``).

    A second signal ends the process at once.
    """
    received: list[int] = []

    async def supervised() -> None:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            if received:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            received.append(number)
            task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number)
        os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_in, after_in_child=_take_no_part)
        logs.quiet_libraries()
        try:
            await task
        except asyncio.CancelledError:
            if not received:
                raise

    asyncio.run(supervised())
    if not received:
        return ExitCode.DONE
    return ExitCode.INTERRUPTED if received[0] == signal.SIGINT else on_sigterm
