"""Scenarios: what the simulator says of a run that no one has machines for; docs/simulation.md's experiments, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibrate_simulator, square_cube
from peers.cli import run as cli
from swarm.errors import ExitCode, UsageError
from swarm.ids import PeerId
from swarm.policy.rebalancing import paper_move
from swarm.sim.scenario.churn import read_trace
from swarm.sim.scenario.config import Scenario, load, parse
from swarm.sim.scenario.meter import Result
from swarm.sim.scenario.optimum import best_assignment, throughput
from swarm.sim.scenario.play import Policy, play

EXAMPLES = Path(__file__).parent.parent / "examples"
MEASURED = Path(__file__).parent.parent / "docs" / "data" / "calibration.json"


def scenario(**sections: Any) -> Scenario:
    """Two stages of two peers; ``sections`` replace whole tables."""
    raw: dict[str, Any] = {
        "scenario": {"name": "small", "steps": 3},
        "model": {"layers": 2, "width": 64, "heads": 1, "sequence_length": 32, "stages": 2},
        "step": {"microbatches": 24, "microbatch_size": 1},
        "peers": [{"class": "a", "count": 4, "forward_seconds": 0.5}],
    }
    return parse({**raw, **sections}, "test")


def run(**sections: Any) -> Result:
    return play(scenario(**sections), Policy(), 0)


# --- the optimum --------------------------------------------------------------------------


def brute_force(counts: list[int], rates: list[list[float]]) -> float:
    """Every way to spread two classes over two stages."""
    return max(
        throughput([[a, counts[0] - a], [b, counts[1] - b]], rates)
        for a in range(counts[0] + 1)
        for b in range(counts[1] + 1)
    )


@pytest.mark.fast
@pytest.mark.parametrize("counts", [[3, 4], [1, 1], [5, 0], [7, 2]])
@pytest.mark.parametrize("rates", [[[1.0, 1.0], [0.5, 0.5]], [[1.0, 0.3], [0.2, 0.9]], [[2.0, 1.0], [0.0, 1.0]]])
def test_the_best_assignment_is_the_best(counts: list[int], rates: list[list[float]]) -> None:
    best, assignment = best_assignment(counts, rates)
    assert best == pytest.approx(brute_force(counts, rates), rel=2e-3)
    assert [sum(row) for row in assignment] == counts
    assert throughput(assignment, rates) == best


@pytest.mark.fast
def test_too_few_peers_do_nothing() -> None:
    assert best_assignment([1], [[1.0, 1.0]])[0] == 0.0


# --- one run ------------------------------------------------------------------------------


@pytest.mark.fast
def test_a_run_comes_near_the_best_and_says_where_time_went() -> None:
    result = run(step={"microbatches": 96, "microbatch_size": 1})
    assert 0.85 < result.fraction <= 1.0
    assert result.microbatches == 3 * 96
    assert result.optimum_per_second == pytest.approx(2 / 1.5, rel=1e-3)
    assert 0.8 < result.utilisation["a"] <= 1.0
    assert result.useful == pytest.approx(1.0, abs=0.02)
    assert result.bytes_by_role["trainer"]["sent forward"] > 0
    assert result.moves == result.deaths == result.repaired == 0


@pytest.mark.fast
def test_the_same_seed_is_the_same_run() -> None:
    jitter = [{"class": "a", "count": 4, "forward_seconds": 0.5, "jitter": 0.3}]
    same = [play(scenario(peers=jitter), Policy(), seed).step_seconds for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


@pytest.mark.fast
def test_a_thin_link_is_what_bounds_the_run() -> None:
    wide = {"layers": 2, "width": 1024, "heads": 1, "sequence_length": 256, "stages": 2}
    free = run(model=wide)
    thin = run(
        model=wide,
        peers=[{"class": "a", "count": 4, "forward_seconds": 0.5, "up_mbit": 2, "down_mbit": 2}],
        overhead={"reduce_over_links": False},
    )
    # A boundary of 1 MiB takes 4.2 s, and each of the two peers of a stage carries one each way per microbatch.
    most = 2 / 4.19
    assert thin.seconds > 2 * free.seconds
    assert 0.6 * most < thin.microbatches_per_second < most


@pytest.mark.fast
def test_a_class_that_has_no_memory_for_a_stage_gets_none() -> None:
    peers = [
        {"class": "big", "count": 2, "forward_seconds": 0.5, "memory_gb": 16},
        {"class": "small", "count": 2, "forward_seconds": 0.5, "memory_gb": 1e-4},
    ]
    result = run(peers=peers)
    assert "small" not in result.utilisation  # none was started
    assert result.utilisation["big"] > 0.5


@pytest.mark.simulated
def test_peers_that_die_are_replaced_and_nothing_of_a_commit_is_lost() -> None:
    result = run(
        scenario={"name": "churn", "hours": 0.3},
        peers=[{"class": "a", "count": 8, "forward_seconds": 0.5, "up_mbit": 100, "down_mbit": 100}],
        churn={"mean_life_hours": 0.1, "mean_away_minutes": 1.0},
    )
    assert result.deaths >= 10
    assert result.repaired > 0
    assert result.steps > 20
    assert 0.3 < result.fraction < 1.0


# --- policies -------------------------------------------------------------------------------


@pytest.mark.fast
def test_the_papers_rule() -> None:
    def queues(*stages: dict[str, float]) -> list[dict[PeerId, float]]:
        return [{PeerId(peer): queue for peer, queue in stage.items()} for stage in stages]

    assert paper_move(queues({"a": 3, "b": 1}, {"c": 9}))[:2] == ("b", 1)  # type: ignore[index]
    assert paper_move(queues({"a": 0}, {"c": 9})) is None  # never the last of a stage
    assert paper_move(queues({"a": 2, "b": 2}, {"c": 2, "d": 3})) is None  # as good as equal
    assert paper_move([]) is None


@pytest.mark.simulated
def test_stochastic_wiring_at_a_fixed_placement() -> None:
    """Experiment 2, small: 16 peers of four speeds on 2 stages."""
    peers = [
        {"class": f"{speed}x", "count": 4, "forward_seconds": 4.0 / speed, "jitter": 0.1, "stages": [2, 2]}
        for speed in (1, 2, 4, 8)
    ]
    small = scenario(peers=peers, step={"microbatches": 400, "microbatch_size": 1}, scenario={"name": "w", "steps": 2})
    ours, uniform, static = (play(small, Policy(wiring=w), 0).fraction for w in ("stochastic", "uniform", "static"))
    assert ours > 0.88
    assert max(uniform, static) < 0.45


@pytest.mark.simulated
def test_rebalancing_helps_after_a_stage_has_lost_its_peers(tmp_path: Path) -> None:
    """Experiment 3, small: of 16 peers 7 die, most of them of one stage, and nobody comes."""
    trace = tmp_path / "trace.csv"
    trace.write_text("0,16\n0.2,16\n0.2,9\n3,9\n")
    lost = scenario(
        scenario={"name": "lost", "hours": 1.5},
        peers=[{"class": "a", "count": 16, "forward_seconds": 4.0}],
        step={"microbatches": 64, "microbatch_size": 1},
        churn={"trace": trace, "trace_unit": "hours"},
    )
    none, paper, oracle = (play(lost, Policy(rebalancing=rule), 4) for rule in ("none", "paper-300", "oracle"))
    assert none.deaths == 7
    assert none.moves == 0
    assert none.fraction + 0.05 < paper.fraction < oracle.fraction
    assert 0 < oracle.moves <= paper.moves


@pytest.mark.fast
def test_square_cube() -> None:
    """Experiment 1, small: the order of the models, and less utilisation with more latency."""
    found = {
        round_trip: [square_cube.utilisation(model, round_trip, 1, 8) for model in square_cube.MODELS]
        for round_trip in (0, 100)
    }
    for values in found.values():
        assert values == sorted(values)
    assert all(far < near for near, far in zip(found[0], found[100], strict=True))
    base, busy = square_cube.MODELS[0], square_cube.utilisation(square_cube.MODELS[0], 100, None, 32)
    assert busy > 2 * square_cube.utilisation(base, 100, 1, 8)  # others travel meanwhile


@pytest.mark.simulated
def test_the_simulator_predicts_what_was_measured() -> None:
    """Experiment 5, on figures that real processes gave (docs/simulation.md says how)."""
    compared = calibrate_simulator.compare(json.loads(MEASURED.read_text()))
    assert {name for name, _, _ in compared} == {"compute", "bandwidth", "latency"}
    for name, measured, predicted in compared:
        assert predicted == pytest.approx(measured, rel=calibrate_simulator.TOLERANCE), name


@pytest.mark.simulated
def test_a_hundred_peers_for_five_minutes() -> None:
    """Experiment 4, small: bytes per peer do not grow with the swarm, the trainer's and the DHT's do."""

    def bytes_per_second(count: int) -> tuple[float, float, float]:
        result = run(
            scenario={"name": "many", "hours": 0.1},
            peers=[{"class": "a", "count": count, "forward_seconds": 1.6667}],
            step={"microbatches": 4 * count, "microbatch_size": 1},
        )
        roles = result.bytes_by_role
        return sum(roles["peer"].values()), sum(roles["trainer"].values()), roles["dht"]["read by the trainer"]

    few, many = bytes_per_second(20), bytes_per_second(80)
    assert many[0] == pytest.approx(few[0], rel=0.15)
    assert many[1] == pytest.approx(4 * few[1], rel=0.15)
    assert many[2] == pytest.approx(4 * few[2], rel=0.15)


# --- files and the command -------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("path", sorted((EXAMPLES / "scenarios").glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    found = load(path)
    if found.churn is not None and found.churn.trace is not None:
        assert read_trace(found.churn.trace, found.churn.trace_unit)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"peers": []}, "peers"),
        ({"peers": [{"class": "a", "count": 1, "forward_seconds": 1.0}]}, "fewer peers than the 2 stages"),
        ({"peers": [{"class": "a", "count": 4}]}, "forward_seconds or tflops"),
        ({"peers": [{"class": "a", "count": 4, "tflops": 1, "stages": [1, 1]}]}, "do not add up to count 4"),
        ({"scenario": {"name": "x"}}, "hours or steps"),
        ({"churn": {"mean_away_minutes": 1.0}}, "mean_life_hours or trace"),
        ({"compare": {"rebalancing": ["paper"]}}, "'paper'"),
        ({"compare": {"wiring": ["best"]}}, "compare.wiring"),
        ({"nonsense": {}}, "nonsense: no such key"),
    ],
)
def test_a_wrong_scenario_names_the_culprit(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match="test: ") as error:
        scenario(**sections)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.fast
@pytest.mark.parametrize("text", ["1,2,3\n", "a,1\n", "1,-1\n", "nan,1\n", "", "0,0\n"])
def test_a_wrong_trace_names_file_and_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"trace\.csv"):
        read_trace(path, "hours")


@pytest.mark.fast
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, report, plot = tmp_path / "s.toml", tmp_path / "r.json", tmp_path / "p.png"
    path.write_text(
        '[scenario]\nname = "two rules"\nsteps = 2\n[model]\nlayers = 2\nwidth = 8\nheads = 1\nsequence_length = 4\n'
        "stages = 2\n[step]\nmicrobatches = 8\nmicrobatch_size = 1\n"
        '[[peers]]\nclass = "a"\ncount = 4\nforward_seconds = 1.0\n[compare]\nwiring = ["stochastic", "uniform"]\n'
    )
    assert cli(["simulate", str(path), "--report", str(report), "--plot", str(plot)]) is ExitCode.DONE
    assert "stochastic" in capsys.readouterr().out
    runs = json.loads(report.read_text())["runs"]
    assert [run["policy"]["wiring"] for run in runs] == ["stochastic", "uniform"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate"], "scenario file"),
        (["simulate", "no.toml"], "no.toml: no such file"),
        (["simulate", "x.toml", "--fuzz", "3"], "leave x.toml or --fuzz away"),
        (["simulate", "--fuzz", "2", "--only", "1"], "--fuzz 1"),
        (["simulate", "--fuzz", "1", "--only", "999"], "has faults 0 to"),
        (["simulate", "--fuzz", "0"], "'0'"),
        (["simulate", "--fuzz", "1", "--report", "x.json"], "--report and --plot belong to a scenario"),
        (["simulate", str(EXAMPLES / "scenarios" / "wiring.toml"), "--jobs", "2"], "belong to --fuzz"),
        (["simulate", str(EXAMPLES / "scenarios" / "wiring.toml"), "--plot", "x.jpg"], ".png"),
        (["simulate", str(EXAMPLES / "scenarios" / "wiring.toml"), "--report", "/no/such/x.json"], "/no/such"),
    ],
)
def test_natural_mistakes(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(arguments) is ExitCode.USAGE
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.fast
def test_a_replay_of_no_fault_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["simulate", "--fuzz", "1", "--seed", "7", "--only", "none"]) is ExitCode.DONE
    assert "1 schedules, 0 faults" in capsys.readouterr().out


@pytest.mark.simulated
def test_fuzzing_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["simulate", "--fuzz", "60", "--seed", "30000"]) is ExitCode.DONE
    said = capsys.readouterr().out
    assert "60 schedules" in said
    assert "all kept the guarantees" in said
