"""Which way imports point: the contracts of pyproject.toml break when they should, and light programs start light."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent

CONTRACTS = {
    "swarm/policy/planted.py": (
        "import time",
        "policy and roles know no clock, no randomness, no network and no torch",
    ),
    "swarm/telemetry/planted.py": ("import torch", "telemetry starts without torch and the network"),
    "swarm/ports.py": ("import swarm.policy", "adapters do not know each other"),
    "swarm/ids.py": ("import pickle", "nothing is unpickled"),
    "swarm/errors.py": ("import peers", "swarm does not import the programs"),
}
"""Where a forbidden import is planted, and the contract that must break."""


def lint(folder: Path) -> str:
    """What import-linter says of the sources in ``folder``."""
    program = Path(sys.executable).with_name("lint-imports")
    command = [str(program), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False).stdout


def test_each_contract_breaks_when_it_should(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("swarm", "peers"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "peers" / "__init__.py").touch()
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in lint(tmp_path)
    for name, (statement, _) in CONTRACTS.items():
        path = tmp_path / name
        path.write_text((path.read_text() if path.exists() else "") + f"\n{statement}\n")
    said = " ".join(lint(tmp_path).split())
    for statement, contract in CONTRACTS.values():
        assert f"{contract} BROKEN" in said, statement


@pytest.mark.parametrize("package", ["swarm.ports", "swarm.policy", "swarm.roles", "swarm.telemetry", "swarm.sim"])
def test_light_packages_import_nothing_heavy(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package}")
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), {package + "."!r}):
    importlib.import_module(module.name)
heavy = {{"torch", "hivemind", "grpc", "matplotlib", "scipy", "transformers"}} & set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
