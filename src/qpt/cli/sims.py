"""`qpt sims`: install the simulators, the one way that works."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import requires
from typing import Annotated, Literal

import tyro

from qpt.cli.run import run_group
from qpt.errors import QptError

Choice = Literal["bullet", "safety-gymnasium", "metadrive", "all"]
# suite: (what it needs, the simulator itself, whose own pins cannot be met and so is installed without them)
PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "bullet": (("numpy", "pybullet"), "bullet-safety-gym==1.4.0"),
    "safety-gymnasium": (("numpy", "mujoco", "xmltodict", "pyyaml", "imageio"), "safety-gymnasium==0.4.0"),
    "metadrive": (("numpy", "panda3d", "pygame"), "metadrive-simulator==0.2.6.0"),
}


def commands(suite: str) -> list[list[str]]:
    """The two pip commands: what the simulators need, then the simulators without their dependencies."""
    chosen = [PACKAGES[name] for name in (PACKAGES if suite == "all" else [suite])]
    versions = pinned()
    needs = dict.fromkeys(versions[need] for needs, _ in chosen for need in needs)
    pip = [sys.executable, "-m", "pip", "install"]
    return [[*pip, *needs], [*pip, "--no-deps", *(simulator for _, simulator in chosen)]]


def pinned() -> dict[str, str]:
    """The requirements of the extra `sims`, by name: the one place where versions are chosen."""
    lines = [line for line in requires("qpt") or [] if re.search(r"extra == .sims.", line)]
    found = (re.match(r"([\w.-]+)([^;]*)", line) for line in lines)
    return {match[1].lower(): (match[1] + match[2].replace(" ", "")) for match in found if match}


def install(suite: Annotated[Choice, tyro.conf.Positional] = "all", dry_run: bool = False) -> int:
    """Install simulators into the Python that runs qpt.

    Example: qpt sims install bullet

    Args:
        suite: Which simulators: bullet, safety-gymnasium, metadrive or all.
        dry_run: Print the commands and run nothing.
    """
    for command in commands(suite):
        print("$", " ".join(f"'{word}'" if any(c in word for c in "<>") else word for word in command), flush=True)
        if dry_run:
            continue
        done = subprocess.run([*command, "--disable-pip-version-check"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise QptError(f"pip failed: {essence(done.stderr or done.stdout)}")
    if not dry_run:
        print("installed; `qpt doctor` checks that every task runs")
    return 0


def essence(output: str) -> str:
    """What pip says went wrong, without its progress and advice."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or [
        line for line in lines if "No module named" in line
    ]
    text = " ".join((errors or lines or ["it said nothing"])[:3])
    hint = "; a uv environment has no pip: run `uv pip install pip` first" if "No module named pip" in text else ""
    return text.rstrip(".") + hint


def main(args: Sequence[str]) -> int:
    return run_group({"install": install}, args, prog="sims")
