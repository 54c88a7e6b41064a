"""Events in words, one line each: 'peer 3f2a of stage 1 died, 2 microbatches repaired by 9c41'."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.ids import PeerId, short
from swarm.telemetry.journal import Event, Value

_HIDDEN = frozenset({"session", "endpoint", "run", "pid", "term"})
"""Fields that the reader of one line does not need; the journal's file has them."""


def describe(event: Event) -> str:
    """The event without its time; fields that the words leave out follow in brackets.  Unknown kinds: key=value."""
    fields = _Fields(dict(event.fields))
    text = _said(event.kind, fields)
    if text is None:
        return " ".join([event.kind, *(f"{name}={_shown(value)}" for name, value in fields.left.items())])
    reason = fields.take("reason")
    if reason:
        text += f": {_shown(reason)}"
    rest = [f"{n} {_shown(v)}" for n, v in fields.left.items() if n not in _HIDDEN and v is not None]
    return f"{text} ({', '.join(rest)})" if rest else text


def _said(kind: str, fields: _Fields) -> str | None:
    match kind:
        case "step":
            return _step(fields)
        case "leads":
            version = fields.take("version")
            return f"training goes on after step {version}" if version else "training begins"
        case "start" | "kill":
            return f"{kind}ed {fields.who()}"
        case "peer_joined":
            return f"{fields.peer()} joined{fields.stage(' stage {}')}"
        case "peer_ready":
            return f"{fields.who()} is ready"
        case "peer_left":
            return f"{fields.who()} left"
        case "peer_lost":
            return f"{fields.who()} died"
        case "peer_suspected":
            return f"{fields.who()} failed a call and is left alone for a while"
        case "peer_banned":
            return f"{fields.who()} is banned"
        case "peer_diverged":
            return f"{fields.who()} differs from its group"
        case "other_version":
            return f"{fields.who()} is left out"
        case "fenced":
            return f"{fields.who()} sits the step out"
        case "reduce_refused" | "apply_refused":
            return f"{fields.who()} refused to {kind.removesuffix('_refused')}"
        case "repaired":
            return _repaired(fields)
        case "mending":
            return f"{fields.microbatches()} of {fields.who()} computed again, for it is gone"
        case "dropped":
            return f"{fields.who()} dropped its gradient, {fields.microbatches()} to repair"
        case "not_finite":
            return f"{fields.microbatches()} not finite{fields.text(' ({})', 'where')} at {fields.who()}"
        case "gradient_not_finite":
            return f"the gradient of {fields.who()} is not finite, its microbatches are computed again"
        case "voided":
            at = fields.name(" at {}", "at", "peer")
            return f"{fields.microbatches()} voided{at}{fields.stage(' of stage {}')}"
        case "retried":
            return f"{fields.microbatches()} taken from {fields.who()}{fields.name(' to {}', 'to')}"
        case "excluded":
            return f"{fields.microbatches()} left out, not finite at two peers"
        case "stage_empty":
            return f"{fields.stage('stage {}') or 'a stage'} has no peer, waiting for one"
        case "stage_back":
            return f"{fields.stage('stage {}') or 'the stage'} has a peer again"
        case "attempt_failed":
            number, stage = fields.take("attempt"), fields.stage(" of stage {}")
            return f"attempt{'' if number is None else f' {_shown(number)}'}{stage}{fields.step(' at step {}')} failed"
        case "committed":
            return f"{fields.step('step {}') or 'a step'} committed"
        case "superseded":
            return f"another trainer{fields.name(' ({})', 'by', 'trainer', 'peer')} leads this run"
        case "state_fetched":
            return _fetched(fields)
        case "donor_failed":
            return f"{fields.who()} could not give its state"
        case "waiting_for_donor":
            return f"waiting for a peer that has the state{fields.stage(' of stage {}')}"
        case "applied":
            return f"{fields.step('step {}') or 'a step'} applied{fields.stage(' at stage {}')}"
        case "gradient_lost":
            return f"gradient of {fields.microbatches()} lost{fields.step(' at step {}')}"
        case "apply_failed":
            return f"an update failed{fields.stage(' at stage {}')}"
        case "reduce_ended":
            return f"all-reduce ended{fields.stage(' at stage {}')}"
        case _:
            return None


def _step(fields: _Fields) -> str:
    parts = [fields.step("step {}")]
    loss, tokens, seconds = (fields.take(name) for name in ("loss", "tokens", "seconds"))
    if isinstance(loss, int | float):
        parts.append(f"loss {loss:.4f}")
    if isinstance(tokens, int | float) and isinstance(seconds, int | float) and seconds > 0:
        parts.append(f"{tokens / seconds:.0f} tokens/s")
    return "  ".join(parts)


def _repaired(fields: _Fields) -> str:
    """``by`` computed again what ``peer`` held, who need not be dead, or ``lost``, who is."""
    dead, stage = fields.name("peer {}", "lost"), fields.stage(" of stage {}")
    count, by = fields.microbatches(), fields.name(" by {}", "by")
    if dead:
        return f"{dead}{stage} died, {count} repaired{by}"
    return f"{count}{fields.name(' of peer {}', 'peer')}{stage} repaired{by}"


def _fetched(fields: _Fields) -> str:
    """With ``donor``, ``peer`` is who fetched; without, the journal is the fetcher's own and ``peer`` the donor."""
    donor, size = fields.name(" from {}", "donor"), fields.take("nbytes")
    who = f"{fields.who()} fetched its state" if donor else f"state{fields.stage(' of stage {}')} fetched"
    text = who + (donor or fields.name(" from {}", "peer"))
    return f"{text}, {size / 2**20:.1f} MiB" if isinstance(size, int) else text


@dataclass(slots=True)
class _Fields:
    """What has not been said yet."""

    left: dict[str, Value]

    def take(self, *names: str) -> Value:
        """The first of these fields that is there, or None."""
        for name in names:
            if self.left.get(name) is not None:
                return self.left.pop(name)
        return None

    def name(self, phrase: str, *names: str) -> str:
        """The short name of the peer in one of these fields, in ``phrase``; empty if there is none."""
        value = self.take(*names)
        return "" if value is None else phrase.format(short(PeerId(_shown(value))))

    def text(self, phrase: str, name: str) -> str:
        """This field in ``phrase``; empty if it is not there."""
        value = self.take(name)
        return "" if value is None else phrase.format(_shown(value))

    def stage(self, phrase: str) -> str:
        """The stage in ``phrase``, or empty."""
        return self.text(phrase, "stage")

    def step(self, phrase: str) -> str:
        """The step in ``phrase``, or empty."""
        return self.text(phrase, "step")

    def peer(self) -> str:
        """'peer 3f2a'."""
        return self.name("peer {}", "peer") or "a peer"

    def who(self) -> str:
        """'peer 3f2a of stage 1'."""
        return self.peer() + self.stage(" of stage {}")

    def microbatches(self) -> str:
        """'1 microbatch', '2 microbatches' by their number, or 'microbatch 7' by its id."""
        number = self.take("count", "microbatches")
        if number is not None:
            return "1 microbatch" if number == 1 else f"{_shown(number)} microbatches"
        value = self.take("microbatch")
        return "a microbatch" if value is None else f"microbatch {_shown(value)}"


def _shown(value: Value) -> str:
    """On one line, without control characters: text may come from other machines."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "".join(c if c.isprintable() else " " for c in str(value))
