"""The program ``swarm``: options in, exit code out.  Heavy imports happen in the command that needs them."""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from swarm import __version__
from swarm.errors import ExitCode, Fatal, UsageError

EPILOG = "exit codes: 0 done, 1 run or verification failed, 2 usage, 3 cannot join, 4 state lost, 130 interrupted"

_OVERRIDES = {
    "name": ("run.name", str),
    "seed": ("run.seed", int),
    "learning_rate": ("optimizer.learning_rate", float),
    "microbatches": ("step.microbatches", int),
    "microbatch_size": ("step.microbatch_size", int),
    "data": ("data.path", str),
}
"""Flags that win over the run file."""


class _Parser(argparse.ArgumentParser):
    """Errors are UsageError, so that they end like all others: one line, exit code 2.  No guessing of options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see '{self.prog} --help')")


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is no positive {'whole ' if kind is int else ''}number")
        return value

    return read


def size(text: str) -> int:
    """Bytes: '512M', '8G', '1.5GiB', or a plain number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; examples: 512M, 8G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def peer_counts(text: str) -> tuple[int, ...]:
    """'2,2,2' -> (2, 2, 2)."""
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of peers per stage, 1 or more each; example: 2,2,2")
    return tuple(int(part) for part in text.split(","))


def _natural(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def fault_numbers(text: str) -> tuple[int, ...]:
    """'3,17' -> (3, 17); 'none' -> ()."""
    if text == "none":
        return ()
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; example: 3,17")
    return tuple(int(part) for part in text.split(","))


def slow_peer(text: str) -> tuple[int, int, float]:
    """'1.0:4' -> (1, 0, 4.0): peer 0 of stage 1 takes four times as long."""
    match = re.fullmatch(r"([0-9]+)\.([0-9]+):([0-9]+(?:\.[0-9]+)?)", text)
    if match is None or float(match[3]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE.PEER:FACTOR, a factor of 1 or more; example: 1.0:4")
    return int(match[1]), int(match[2]), float(match[3])


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = _Parser(prog="swarm", description="Train one model on many unreliable machines, exactly.", epilog=EPILOG)
    top.add_argument("--version", action="version", version=f"swarm {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=about, epilog=EPILOG)

    bootstrap = command(
        "bootstrap", "a DHT entry point; prints the address to join, and nothing else, on standard output"
    )
    bootstrap.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: %(default)s")
    bootstrap.add_argument("--announce", metavar="HOST[:PORT]", help="what others dial, if it is not --listen")
    bootstrap.add_argument("--identity", type=Path, metavar="FILE", help="key file; made once, then used again")

    peer = command("peer", "serve one stage of a run")
    _join(peer)
    peer.add_argument("--run", metavar="NAME", help="which run, where several share one swarm")
    peer.add_argument("--stage", type=int, metavar="N", help="default: the stage with the least throughput")
    peer.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: %(default)s")
    peer.add_argument("--announce", metavar="HOST:PORT", help="what others dial, if it is not --listen")
    _dht_place(peer, "default: the host of --listen and any free port", "default: the host of --announce")
    peer.add_argument(
        "--device", default="auto", metavar="DEVICE", help="cpu, cuda, cuda:1; default: cuda if there is one"
    )
    peer.add_argument("--threads", type=_positive(int), default=1, metavar="N", help="compute threads; default: 1")
    peer.add_argument("--max-memory", type=size, metavar="SIZE", help="of the stage's state; example: 8G")
    peer.add_argument("--identity", type=Path, metavar="FILE", help="key file; made once, then used again")
    peer.add_argument("--journal", type=Path, metavar="FILE", help="append events there as JSON lines")
    peer.add_argument(
        "--emulate-slowness", type=_positive(float), default=1.0, metavar="FACTOR",
        help="for experiments: each computation takes so many times as long",
    )  # fmt: skip
    peer.add_argument(
        "--emulate-seconds", type=_positive(float), default=0.0, metavar="SECONDS",
        help="for experiments: each forward takes at least so long, each backward twice that",
    )  # fmt: skip

    train = command(
        "train", "publish a run if it is new, route its microbatches, lead its steps; run again, it continues"
    )
    _run_file(train)
    _join(train)
    _dht_place(train, "default: nowhere, for the trainer needs nobody to dial it", "default: --dht-listen")
    train.add_argument("--steps", type=_positive(int), metavar="N", help="committed steps in all; default: total_steps")
    train.add_argument("--state-dir", type=Path, metavar="DIR", help="default: ~/.local/state/swarm/NAME-HASH")
    train.add_argument(
        "--state-timeout", type=_positive(float), default=60.0, metavar="SECONDS",
        help="give up (exit 4) when a committed state is held by nobody for so long; default: 60",
    )  # fmt: skip
    train.add_argument("--report", type=Path, metavar="FILE", help="write a JSON report and a plot beside it")
    train.add_argument("--journal", type=Path, metavar="FILE", help="append events there as JSON lines")
    train.add_argument(
        "--first-peers", type=peer_counts, metavar="2,2,2",
        help="peers per stage to wait for before the very first step; default: 1 each",
    )  # fmt: skip
    train.add_argument("--journal-views", action="store_true", help="and what the screen shows, twice a second")

    local = command("local", "a whole swarm as child processes on this machine")
    _run_file(local)
    local.add_argument("--peers", type=peer_counts, metavar="2,2,2", help="peers per stage; default: 1 each")
    local.add_argument("--steps", type=_positive(int), metavar="N", help="default: total_steps of the optimizer")
    local.add_argument("--kill-every", type=_positive(float), metavar="SECONDS", help="kill a peer so often")
    local.add_argument("--start-every", type=_positive(float), metavar="SECONDS", help="start a peer so often")
    local.add_argument(
        "--slow", type=slow_peer, action="append", default=[], metavar="STAGE.PEER:FACTOR",
        help="that peer takes FACTOR times as long; may be repeated",
    )  # fmt: skip
    local.add_argument("--state-timeout", type=_positive(float), default=60.0, metavar="SECONDS")
    local.add_argument(
        "--verify", action="store_true", help="compare with a single process afterwards; exit 1 if unequal"
    )
    local.add_argument("--report", type=Path, metavar="FILE", help="write a JSON report and a plot beside it")
    local.add_argument("--keep", type=Path, metavar="DIR", help="keep the children's logs and journals there")

    reference = command("reference", "the same run in a single process: the definition of what is right")
    _run_file(reference)
    reference.add_argument("--steps", type=_positive(int), metavar="N", help="default: total_steps of the optimizer")
    reference.add_argument("--device", default="cpu", metavar="DEVICE", help="default: cpu")
    reference.add_argument("--threads", type=_positive(int), default=1, metavar="N", help="default: 1")
    reference.add_argument("--report", type=Path, metavar="FILE", help="write a JSON report and a plot beside it")

    simulate = command(
        "simulate", "the same roles on a virtual clock: random faults (--fuzz), or a scenario from a file"
    )
    simulate.add_argument(
        "scenario", type=Path, nargs="?", metavar="SCENARIO.toml", help="what is simulated (docs/simulation.md)"
    )
    simulate.add_argument("--seed", type=_natural, default=0, metavar="S", help="fixes everything; default: 0")
    simulate.add_argument(
        "--fuzz",
        type=_positive(int),
        metavar="N",
        help="N random schedules of faults, from seed S on; exit 1 on a fault",
    )
    simulate.add_argument(
        "--only", type=fault_numbers, metavar="3,17", help="with --fuzz 1: only these of the schedule's faults"
    )
    simulate.add_argument(
        "--journal", type=Path, metavar="FILE", help="with --fuzz: write the last failure's events there"
    )
    simulate.add_argument(
        "--jobs", type=_positive(int), default=1, metavar="N", help="with --fuzz: processes; default: 1"
    )
    simulate.add_argument("--report", type=Path, metavar="FILE", help="of a scenario: write a JSON report")
    simulate.add_argument("--plot", type=Path, metavar="FILE.png", help="of a scenario: draw it")

    status = command("status", "who serves what, at which version, how fast; which stage has no peer")
    _join(status)
    status.add_argument("--run", metavar="NAME", help="only this run")
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    return top


def _join(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--join", nargs="+", required=True, metavar="ADDRESS", help="what `swarm bootstrap` or a peer prints"
    )


def _dht_place(command: argparse.ArgumentParser, listen: str, announce: str) -> None:
    command.add_argument("--dht-listen", metavar="HOST:PORT", help=f"of the DHT and the all-reduce; {listen}")
    command.add_argument("--dht-announce", metavar="HOST:PORT", help=f"what others dial for these; {announce}")


def _run_file(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_file", type=Path, metavar="RUN.toml", help="the run's config (docs/config.md)")
    for flag, (key, kind) in _OVERRIDES.items():
        command.add_argument(
            f"--{flag.replace('_', '-')}", type=kind, dest=f"set_{flag}", metavar="VALUE", help=f"instead of {key}"
        )


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    """The config keys that flags were given for."""
    values = {key: getattr(options, f"set_{flag}", None) for flag, (key, _) in _OVERRIDES.items()}
    return {key: value for key, value in values.items() if value is not None}


def flags_of(values: dict[str, Any]) -> list[str]:
    """Inverse of :func:`overrides`, for a child process."""
    names = {key: f"--{flag.replace('_', '-')}" for flag, (key, _) in _OVERRIDES.items()}
    return [word for key, value in values.items() for word in (names[key], str(value))]


def run(arguments: Sequence[str]) -> ExitCode:
    """Parse and run."""

    def main() -> ExitCode:
        options = parser().parse_args(arguments)
        code: ExitCode = importlib.import_module(f"peers.{options.command}").main(options)
        return code

    return guarded(main)


def guarded(main: Callable[[], ExitCode]) -> ExitCode:
    """Every foreseen end is an exit code, and every failure one line on standard error."""
    try:
        return main()
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Fatal as error:
        print(f"swarm: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if _is_of_the_machine(error):
            return _explain_machine(error)
        raise
    except BaseExceptionGroup as group:
        return _explain(group)


def _explain(group: BaseExceptionGroup[BaseException]) -> ExitCode:
    """The foreseen reason among several errors; if there is none, all of them, with their traces."""
    for error in _leaves(group):
        if isinstance(error, Fatal):
            print(f"swarm: {error}", file=sys.stderr)
            return error.exit_code
    if group.subgroup(KeyboardInterrupt) is not None:
        return ExitCode.INTERRUPTED
    leaves = list(_leaves(group))
    if all(_is_of_the_machine(error) for error in leaves) and isinstance(leaves[0], OSError):
        return _explain_machine(leaves[0])
    logging.getLogger(__name__).error("unforeseen", exc_info=group)
    return ExitCode.FAILED


def _is_of_the_machine(error: BaseException) -> bool:
    # asyncio's own TimeoutError is an OSError as well, but has no number.
    return isinstance(error, OSError) and error.errno is not None


def _explain_machine(error: OSError) -> ExitCode:
    """Disk full, file gone: one line.  Of a reader that has gone away (``| head``) nothing is said."""
    if not isinstance(error, BrokenPipeError):
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"swarm: {where}{error.strerror or error}", file=sys.stderr)
    return ExitCode.FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def main() -> NoReturn:
    """Entry point of the script ``swarm``."""
    sys.exit(run(sys.argv[1:]))
