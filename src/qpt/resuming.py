"""Whether what a folder holds is the run that shall go on in it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qpt import checkpoint
from qpt.algorithms.base import config_from
from qpt.errors import QptError


def check_free(out: Path, logs: tuple[str, ...], resume: bool) -> bool:
    """Refuse a folder that is not for this run; True where a run has begun there."""
    try:
        if (out / checkpoint.MANIFEST).exists():
            raise QptError(f"{out} is itself a checkpoint; give the folder of its run, or another --out")
        if (out / "checkpoints").is_symlink() and not (out / "checkpoints").exists():
            raise QptError(f"{out / 'checkpoints'} is a link to nothing; is its disk mounted? mend it, or delete it")
        begun = (out / "run.json").exists()
        foreign = [name for name in logs if (out / name).exists() and not begun]
    except (OSError, ValueError) as error:  # no name that a file system knows
        raise QptError(f"{str(out)!r} cannot be a folder ({error}); choose another --out") from error
    if resume and not begun:
        raise QptError(f"there is nothing to resume in {out}; leave out --resume to start a run there")
    if not resume and (begun or checkpoint.checkpoints(out)):
        raise QptError(f"{out} already holds a run; add --resume to continue it, or choose another --out")
    if foreign:
        raise QptError(f"{out} already holds a file {foreign[0]} that is of no run; choose another --out")
    return begun


def read_facts(out: Path) -> dict[str, Any]:
    """What run.json says of the run in a folder."""
    try:
        facts = json.loads((out / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise QptError(f"{out / 'run.json'} cannot be read ({error}); choose another --out") from error
    if not isinstance(facts, dict) or not {"algorithm", "config", "seed", "data", "versions"} <= set(facts):
        raise QptError(f"{out} already holds a file run.json that is of no run; choose another --out")
    return facts


def check_same(out: Path, began: dict[str, Any], now: dict[str, Any], config: Any) -> None:
    """Refuse to go on with other data, settings, or a device whose generators cannot take over."""
    if began["data"]["fingerprint"] != now["data"]["fingerprint"]:
        raise QptError(
            f"the run in {out} began with other data; give the same data, or start a new run with another --out"
        )
    changed = [f"--{name} {began[name]}" for name in ("seed", "algorithm") if began[name] != now[name]]
    if not changed:  # a setting that is newer than the run has its default
        before = json.loads(json.dumps(asdict(config_from(type(config), began["config"]))))
        changed = [_flag(k, v) for k, v in sorted(before.items()) if k != "steps" and v != now["config"][k]]
    if changed:
        raise QptError(
            f"the run in {out} began with other settings ({', '.join(changed)}); resume with the same, or start a new "
            "run"
        )
    if "spec" in began and any(began["spec"][name] != now["spec"][name] for name in ("task", "horizon")):
        task, horizon = began["spec"]["task"], began["spec"]["horizon"]
        raise QptError(
            f"the run in {out} began with {f'--task {task}' if task else 'no --task'} and a horizon of {horizon}; "
            "resume with the same, or start a new run"
        )
    processes = began.get("processes", 1)
    if processes != now["processes"]:
        how = f"torchrun --nproc-per-node {processes} -m qpt train" if processes > 1 else "qpt train"
        raise QptError(f"the run in {out} has {processes} process(es), not {now['processes']}; resume it with {how}")
    device = began.get("device", now["device"])
    if device != now["device"]:  # generators of one kind of device cannot go on on another
        raise QptError(f"the run in {out} began on {device}; resume it with --device {device}")
    precision = began.get("precision", now["precision"])
    if precision != now["precision"]:
        raise QptError(f"the run in {out} began in {precision}; resume it with --precision {precision}")


def _flag(name: str, value: Any) -> str:
    """As the command line has it."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
