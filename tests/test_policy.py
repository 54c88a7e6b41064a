"""Every decision as a pure function: properties, and the numbers that others rely on."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import OptimizerSection
from swarm.ids import Digest, MicrobatchId, PeerId, RunHash, SessionId
from swarm.messages import StateMark
from swarm.policy.admission import MAX_WAITING, retry_after
from swarm.policy.closing import plan_close
from swarm.policy.deadlines import (
    LAN,
    LONGEST_CALL_SECONDS,
    WAN,
    Patience,
    call_deadline,
    control_deadline,
    transfer_deadline,
)
from swarm.policy.divergence import TOLERANCE, diverged
from swarm.policy.grouping import sits_out
from swarm.policy.health import BAN_SECONDS, FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS, Health
from swarm.policy.placement import choose_stage
from swarm.policy.routing import BACKWARD_UNITS, FORWARD_UNITS, Lane, choose
from swarm.policy.schedule import clip_factor, learning_rate
from swarm.records import Lineage, PeerRecord, PeerState

pytestmark = pytest.mark.fast

# --- routing ----------------------------------------------------------------------------


def shares(seconds_per_unit: list[float], microbatches: int, window: int) -> list[int]:
    """Closed loop: each lane serves its calls in order; a finished microbatch lets the next one in."""
    lanes = [Lane() for _ in seconds_per_unit]
    named = [(PeerId(str(index)), lane) for index, lane in enumerate(lanes)]
    free_at = [0.0] * len(lanes)
    counts = [0] * len(lanes)
    running: list[tuple[float, int, int, float]] = []
    units = FORWARD_UNITS + BACKWARD_UNITS
    now = 0.0
    for index in range(microbatches):
        if len(running) == window:
            now, _, lane, sent_at = heapq.heappop(running)
            lanes[lane].answered(units, sent_at, now)
        name = choose(named, units, str(index))
        assert name is not None
        chosen = int(name)
        counts[chosen] += 1
        lanes[chosen].sent(units)
        free_at[chosen] = max(now, free_at[chosen]) + units * seconds_per_unit[chosen]
        heapq.heappush(running, (free_at[chosen], index, chosen, now))
    return counts


@given(slowness=st.floats(1.0, 8.0), window=st.integers(20, 30))
def test_work_is_shared_in_proportion_to_speed(slowness: float, window: int) -> None:
    """With enough in flight that the slow one is not too late for any of it."""
    fast, slow = shares([0.1, 0.1 * slowness], 400, window)
    assert fast + slow == 400
    assert slow / 400 == pytest.approx(1 / (1 + slowness), abs=0.06)


def test_a_lane_four_times_slower_gets_about_a_fifth() -> None:
    _, slow = shares([0.1, 0.4], 400, 8)
    assert 64 <= slow <= 96


def test_equals_share_equally_and_ties_depend_on_the_seed_alone() -> None:
    counts = shares([0.1, 0.1, 0.1], 399, 9)
    assert max(counts) - min(counts) <= 20
    lanes = [(PeerId(name), Lane()) for name in "abcdef"]
    picks = [choose(lanes, 1.0, str(seed)) for seed in range(30)]
    assert picks == [choose(lanes[::-1], 1.0, str(seed)) for seed in range(30)]
    assert len(set(picks)) > 3


def test_an_idle_slow_peer_works_while_there_is_work_and_is_not_waited_for_at_the_end() -> None:
    fast, slow = Lane(seconds_per_unit=1.0), Lane(seconds_per_unit=8.0)
    lanes = [(PeerId("fast"), fast), (PeerId("slow"), slow)]
    fast.sent(3.0)
    assert choose(lanes, 3.0, "0/0", 100.0) == "slow"  # free first, and the stage is busy for long anyway
    assert choose(lanes, 3.0, "0/0", 0.0) == "fast"  # the slow one would be waited for: 24 s, against 6


def test_nobody_to_choose() -> None:
    assert choose([], 1.0, "seed") is None


def test_a_timeout_slows_a_lane_down_for_routing_and_not_for_deadlines() -> None:
    lane = Lane()
    lane.start_from(0.1)
    lane.sent(3.0)
    lane.timed_out(3.0, 0.0, 30.0)
    lane.timed_out(3.0, 1.0, 31.0)  # was under way together with the first
    assert lane.outstanding_units == 0.0
    assert lane.seconds_per_unit == pytest.approx(10.0)
    assert lane.answer_seconds == pytest.approx(0.1)
    assert lane.leniency == 2.0
    for index in range(5):
        lane.timed_out(3.0, 40.0 + index, 41.0 + index)
    assert lane.leniency == 8.0
    lane.sent(3.0)
    lane.answered(3.0, 0.0, 0.6)
    assert lane.leniency == 1.0
    assert lane.answer_seconds == pytest.approx(0.2)


def test_a_lane_that_timed_out_is_tried_again_some_steps_later() -> None:
    """It would never be measured otherwise; and what was measured by answers alone does not wear off."""
    steady, back = Lane(), Lane()
    for lane in (steady, back):
        lane.answered(1.0, 0.0, 0.04)
    back.sent(1.0)
    back.timed_out(1.0, 1.0, 6.0)
    assert back.seconds_per_unit > 1.0

    def share() -> float:
        steady.begin_step()
        back.begin_step()
        picks = []
        for number in range(20):
            pick = choose([(PeerId("steady"), steady), (PeerId("back"), back)], 1.0, str(number))
            (steady if pick == "steady" else back).sent(1.0)
            picks.append(pick)
        return picks.count(PeerId("back")) / len(picks)

    shares = [share() for _ in range(20)]
    assert shares[0] == 0.0
    assert 0.0 < next(s for s in shares if s) < 0.3  # not all at once
    assert shares[-1] == pytest.approx(0.5, abs=0.05)
    assert steady.seconds_per_unit == back.answer_seconds == 0.04


@given(st.lists(st.tuples(st.sampled_from(["sent", "up", "answer", "timeout"]), st.floats(0.0, 4.0))))
def test_a_lane_never_owes_less_than_nothing(events: list[tuple[str, float]]) -> None:
    lane, now = Lane(), 0.0
    for kind, units in events:
        now += 0.1
        if kind == "sent":
            lane.sent(units)
        elif kind == "up":
            lane.given_up(units)
        elif kind == "answer":
            lane.answered(units + 0.1, now - 0.1, now)
        else:
            lane.timed_out(units + 0.1, now - 1.0, now)
        assert lane.outstanding_units >= 0.0
        assert 0.0 < lane.seconds_per_unit < math.inf
        assert 1.0 <= lane.leniency <= 8.0


# --- health and deadlines ------------------------------------------------------------------


def test_backoff_doubles_up_to_its_ceiling_and_one_answer_ends_it() -> None:
    health = Health()
    now, backoffs = 0.0, []
    for _ in range(2000):  # a peer that stays away for weeks must not overflow anything
        backoffs.append(health.failed(now))
        now += backoffs[-1]
    assert backoffs[:3] == [FIRST_BACKOFF_SECONDS, 2 * FIRST_BACKOFF_SECONDS, 4 * FIRST_BACKOFF_SECONDS]
    assert backoffs[-1] == LONGEST_BACKOFF_SECONDS
    assert not health.greet_due(now - 0.1)
    assert health.greet_due(now)
    health.succeeded(now)
    assert not health.greet_due(1e9)
    assert health.failed(now) == FIRST_BACKOFF_SECONDS


def test_calls_that_fail_together_count_once() -> None:
    health = Health()
    for _ in range(6):
        health.failed(now=0.0)
    assert health.greet_due(FIRST_BACKOFF_SECONDS)


def test_a_late_answer_does_not_end_a_ban() -> None:
    health = Health()
    health.misbehaved(now=0.0)
    health.succeeded(now=1.0)
    assert health.suspected
    assert not health.greet_due(LONGEST_BACKOFF_SECONDS - 1)
    health.succeeded(now=LONGEST_BACKOFF_SECONDS)
    assert not health.suspected


def test_rubbish_twice_in_a_row_bans() -> None:
    health = Health()
    assert health.misbehaved(now=0.0) == LONGEST_BACKOFF_SECONDS
    later = LONGEST_BACKOFF_SECONDS
    assert health.misbehaved(now=later) == BAN_SECONDS
    assert not health.greet_due(later + BAN_SECONDS - 1)


def test_patience_grows_only_with_different_peers() -> None:
    patience = Patience()
    for _ in range(9):
        patience.timeout(PeerId("a"))
    assert patience.factor == 1.0
    factors = []
    for name in "bcdef":
        patience.timeout(PeerId(name))
        factors.append(patience.factor)
    assert factors == [2.0, 4.0, 8.0, 8.0, 8.0]
    patience.success()
    assert patience.factor == 1.0


@given(expected=st.floats(0.0, 1e4), measured=st.booleans(), patience=st.floats(1.0, 8.0))
def test_deadlines_stay_within_their_bounds(expected: float, measured: bool, patience: float) -> None:
    for limits in (LAN, WAN):
        seconds = call_deadline(limits, expected, measured, patience)
        floor = limits.call_floor_seconds if measured else limits.unmeasured_seconds
        assert floor * patience <= seconds <= max(limits.call_ceiling_seconds, LONGEST_CALL_SECONDS) * patience
        assert seconds >= min(expected, limits.call_ceiling_seconds)
        assert control_deadline(limits, expected, patience) >= limits.control_seconds + expected
    assert transfer_deadline(LAN, 20_000_000, 1.0) == pytest.approx(25.0)


def test_a_stage_that_takes_minutes_is_waited_for() -> None:
    """grpc/grpc#32095: what is slow is not dead."""
    assert call_deadline(LAN, 180.0, False, 1.0) > 180.0
    assert call_deadline(LAN, 540.0, True, 1.0) == 1080.0
    assert call_deadline(LAN, 1e9, True, 1.0) == LONGEST_CALL_SECONDS


# --- admission -----------------------------------------------------------------------------


@given(waiting=st.integers(0, 200), seconds=st.floats(0.0, 10.0), deadline=st.floats(0.0, 100.0))
def test_admission(waiting: int, seconds: float, deadline: float) -> None:
    wait = retry_after(waiting, seconds, deadline)
    fits = waiting == 0 or (waiting < MAX_WAITING and (waiting + 1) * seconds <= deadline)
    assert (wait is None) == fits
    assert wait is None or wait >= 0.05


# --- placement -----------------------------------------------------------------------------


def record(peer: str, forward_seconds: float = 0.1) -> PeerRecord:
    return PeerRecord(
        peer=PeerId(peer),
        session=SessionId("s"),
        run=RunHash("r"),
        protocol=1,
        stage=0,
        endpoint="h:1",
        state=PeerState.READY,
        lineage=Lineage.root(RunHash("r")),
        forward_seconds=forward_seconds,
        queue=0,
        numeric_class="c",
    )


def test_an_empty_stage_comes_first_then_the_slowest() -> None:
    assert choose_stage([[record("a")], [], [record("b")]], "me")[0] == 1
    assert choose_stage([[record("a", 0.1)], [record("b", 0.4)], [record("c", 0.2)]], "me")[0] == 1
    stage, reason = choose_stage([[record("a"), record("b")], [record("c", 0.01)]], "me")
    assert stage == 0  # two slow peers do less than a fast one
    assert "2 peers" in reason


def test_many_that_start_at_once_spread() -> None:
    chosen = [choose_stage([[], [], []], f"peer{i}")[0] for i in range(60)]
    assert min(chosen.count(stage) for stage in range(3)) >= 10


# --- the close -----------------------------------------------------------------------------

IDS = st.frozensets(st.integers(0, 9).map(MicrobatchId))
HELD = st.dictionaries(st.sampled_from([PeerId(p) for p in "abcde"]), IDS, max_size=5)


@given(expected=IDS, held=HELD)
def test_plan_close(expected: frozenset[MicrobatchId], held: dict[PeerId, frozenset[MicrobatchId]]) -> None:
    plan = plan_close(expected, held)
    kept = {peer: ids for peer, ids in held.items() if peer not in plan.drops}
    left = [m for ids in kept.values() for m in ids]
    assert len(left) == len(set(left))  # nothing is held twice
    assert frozenset(left) <= expected  # whoever holds what is not expected has dropped
    assert plan.repairs == tuple(sorted(expected - frozenset(left)))
    assert set(plan.drops) <= set(held)
    assert plan.clean == (not plan.drops and not plan.repairs)
    # Nobody drops for nothing: each one held something twice, or something unexpected.
    for peer in plan.drops:
        others = frozenset(m for other, ids in held.items() if other != peer for m in ids)
        assert held[peer] - expected or held[peer] & others
    assert plan == plan_close(expected, dict(reversed(held.items())))


def test_the_cheaper_holder_drops() -> None:
    one, two, three = MicrobatchId(1), MicrobatchId(2), MicrobatchId(3)
    held = {PeerId("a"): frozenset({one, two}), PeerId("b"): frozenset({two}), PeerId("c"): frozenset({three})}
    plan = plan_close(frozenset({one, two, three}), held)
    assert plan.drops == ("b",)
    assert plan.repairs == ()


# --- grouping ------------------------------------------------------------------------------

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_who_does_not_answer_sits_out() -> None:
    out, _ = sits_out({A: frozenset({B})}, frozenset({C}), {}, 0)
    assert out == {C}


def test_whom_two_others_missed_sits_out() -> None:
    out, _ = sits_out({A: frozenset({C}), B: frozenset({C}), C: frozenset()}, frozenset(), {}, 0)
    assert out == {C}


def test_of_two_that_miss_each_other_the_lighter_goes_the_second_time() -> None:
    missed = {A: frozenset({B}), B: frozenset({A})}
    assert sits_out(missed, frozenset(), {A: 5, B: 1}, 0)[0] == frozenset()
    assert sits_out(missed, frozenset(), {A: 5, B: 1}, 1)[0] == {B}


@given(
    missed=st.dictionaries(st.sampled_from([A, B, C]), st.frozensets(st.sampled_from([A, B, C]))),
    attempt=st.integers(0, 3),
)
def test_somebody_always_stays(missed: dict[PeerId, frozenset[PeerId]], attempt: int) -> None:
    out, _ = sits_out(missed, frozenset(), {}, attempt)
    assert len(out) < 3


# --- divergence ----------------------------------------------------------------------------


def mark(norm: float, digest: str | None = None, numeric_class: str = "cpu") -> StateMark:
    return StateMark(
        lineage=Lineage.root(RunHash("r")),
        squared_norm=norm,
        digest=Digest(digest) if digest else None,
        numeric_class=numeric_class,
    )


def test_of_one_class_bits_must_agree() -> None:
    assert diverged({A: mark(1.0), B: mark(1.0), C: mark(1.0)}) == {}
    assert set(diverged({A: mark(1.0), B: mark(1.0), C: mark(1.0 + 1e-6)})) == {C}
    assert diverged({A: mark(1.0), B: mark(1.0 + 1e-13)}) == {}  # summed by another number of threads
    assert set(diverged({A: mark(1.0, "x"), B: mark(1.0, "y"), C: mark(1.0, "y")})) == {A}
    assert diverged({}) == {}
    assert diverged({A: mark(1.0)}) == {}


def test_across_classes_norms_must_agree() -> None:
    near, far = 1.0 + 0.5 * TOLERANCE, 1.0 + 2 * TOLERANCE
    assert diverged({A: mark(1.0), B: mark(1.0), C: mark(near, numeric_class="gpu")}) == {}
    assert set(diverged({A: mark(1.0), B: mark(1.0), C: mark(far, numeric_class="gpu")})) == {C}


@given(st.dictionaries(st.sampled_from([A, B, C]), st.sampled_from([1.0, 2.0, 3.0]).map(mark), min_size=1))
def test_of_one_class_somebody_is_always_right(marks: dict[PeerId, StateMark]) -> None:
    found = diverged(marks)
    rest = {m.squared_norm for p, m in marks.items() if p not in found}
    assert len(rest) == 1


# --- schedule ------------------------------------------------------------------------------


def test_learning_rate() -> None:
    constant = OptimizerSection(learning_rate=0.8, warmup_steps=4)
    assert [learning_rate(constant, step) for step in (0, 1, 3, 4, 99)] == pytest.approx([0.2, 0.4, 0.8, 0.8, 0.8])
    linear = OptimizerSection(learning_rate=1.0, schedule="linear", warmup_steps=2, total_steps=12)
    assert [learning_rate(linear, step) for step in (1, 2, 7, 12, 50)] == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])
    cosine = OptimizerSection(learning_rate=1.0, schedule="cosine", total_steps=10)
    assert [learning_rate(cosine, step) for step in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])


@given(st.floats(0.0, 1e6))
def test_clip_factor_bounds_the_norm(squared_norm: float) -> None:
    assert clip_factor(OptimizerSection(learning_rate=1.0), squared_norm) == 1.0
    factor = clip_factor(OptimizerSection(learning_rate=1.0, clip_norm=2.0), squared_norm)
    assert 0.0 < factor <= 1.0
    assert factor * math.sqrt(squared_norm) <= 2.0 + 1e-9
