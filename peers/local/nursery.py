"""The nursery: a process that imports everything once and forks the swarm's processes from there.

It has no threads (facts of gRPC and torch: fork before any thread starts), a session of its own (a Ctrl-C at the
terminal reaches the launcher only), and it outlives nobody: when the launcher is gone, however it died, the socket to
it closes, and the nursery kills all it has forked, removes their folder, and ends.

Requests and replies are JSON lines over the socket that it inherits.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

IMPORTS = (
    "swarm.averaging.averager",
    "swarm.data.text",
    "swarm.dht.directory",
    "swarm.roles.peer",
    "swarm.roles.trainer",
    "swarm.rpc.client",
    "swarm.rpc.server",
    "swarm.stage.executor",
    "swarm.stage.module",
    "swarm.reference",
    "peers.train",
    "peers.peer",
    "peers.bootstrap",
    "peers.reference",
)
GRACE_SECONDS = 6.0
"""Children have so long to end after SIGTERM."""
PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Nursery:
    """State of the nursery's loop."""

    link: socket.socket
    folder: str
    children: dict[int, str] = field(default_factory=dict)
    """Process id -> name."""
    closing_since: float | None = None
    received: bytes = b""

    def serve(self) -> None:
        """Until the launcher is gone, or asks to close, and all children have ended."""
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self._say(ready=True, threads=len(os.listdir("/proc/self/task")))
        while self.closing_since is None or self.children:
            watched = [wake_read] + ([self.link] if self.closing_since is None else [])
            readable, _, _ = select.select(watched, [], [], 0.5)
            if wake_read in readable:
                wake_read.recv(4096)
            if self.link in readable:
                self._receive()
            self._reap()
            if self.closing_since is not None and time.monotonic() - self.closing_since > GRACE_SECONDS:
                self._signal_all(signal.SIGKILL)

    def _receive(self) -> None:
        data = self.link.recv(1 << 16)
        if not data:
            # The launcher died: nobody waits for anybody's good-bye.
            self.closing_since = time.monotonic() - GRACE_SECONDS
            self._signal_all(signal.SIGKILL)
            return
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, request: dict[str, Any]) -> None:
        match request["do"]:
            case "spawn":
                self._spawn(request["name"], request["entry"], request["arguments"], request["log"])
            case "signal":
                for process in [p for p, name in self.children.items() if name == request["name"]]:
                    os.kill(process, request["signal"])
            case "close":
                self.closing_since = time.monotonic()
                self._signal_all(signal.SIGTERM)

    def _spawn(self, name: str, entry: str, arguments: Sequence[str], log: str) -> None:
        nursery = os.getpid()
        process = os.fork()
        if process:
            self.children[process] = name
            self._say(name=name, process=process)
            return
        code = 1
        try:
            self._become_child(nursery, log)
            module, _, function = entry.partition(":")
            code = int(getattr(importlib.import_module(module), function)(arguments))
        except BaseException as error:  # noqa: BLE001 - the root of a forked process: nothing may return from it
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _become_child(self, nursery: int, log: str) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != nursery:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.link.close()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)

    def _reap(self) -> None:
        while self.children:
            try:
                process, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            name = self.children.pop(process, None)
            if name is not None:
                code = os.waitstatus_to_exitcode(status)
                self._say(name=name, process=process, exit=code, cpu_seconds=usage.ru_utime + usage.ru_stime)

    def _signal_all(self, number: int) -> None:
        for process in self.children:
            os.kill(process, number)

    def _say(self, **fields: Any) -> None:
        try:
            self.link.sendall(json.dumps(fields).encode() + b"\n")
        except OSError:
            self.link.close()  # the launcher is gone: seen as such by the next read
            self.closing_since = self.closing_since or time.monotonic() - GRACE_SECONDS


def main(arguments: Sequence[str]) -> None:
    """``python -m peers.local.nursery SOCKET FOLDER``."""
    folder = arguments[1]
    os.environ["TMPDIR"] = folder
    from peers import life

    life.prepare()
    for name in IMPORTS:
        importlib.import_module(name)
    nursery = Nursery(link=socket.socket(fileno=int(arguments[0])), folder=folder)
    try:
        nursery.serve()
    finally:
        nursery._signal_all(signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
