"""Checkpoints: a folder with manifest.json and safetensors, written whole or not at all, without pickle."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qpt import __version__
from qpt.algorithms.base import Algorithm, Spec, algorithm_classes, config_from
from qpt.data.paths import expanded
from qpt.errors import QptError

FORMAT = 1  # of the folder; raised when old ones can no longer be read
MANIFEST, MODEL, TRAINING = "manifest.json", "model.safetensors", "training.safetensors"
NEEDED = {"algorithm": str, "config": dict, "spec": dict, "sha256": dict}  # the entries of every manifest
EARLIER = "use an earlier one (to --resume from it, delete this one)"
NUMBERED = re.compile(r"(step|best)-\d+")
OF_A_RUN = {"step": int, "seed": int, "data": dict, "processes": int}  # those that a run adds to resume from


def versions() -> dict[str, str]:
    """What a result depends on besides its config and data."""
    return {
        "qpt": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def write_checkpoint(
    folder: Path,
    name: str,
    algorithm: Algorithm,
    config: dict[str, Any],
    training: dict[str, Tensor],
    facts: dict[str, Any],
) -> Path:
    """Write a checkpoint to `folder`, atomically: under a hidden name first, renamed when everything is on the disk."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        _save(staging / MODEL, algorithm.state_dict())
        _save(staging / TRAINING, {**_optimizer_tensors(algorithm), **training})
        manifest = {
            "format": FORMAT,
            "algorithm": name,
            "config": config,
            "spec": algorithm.spec.to_json(),
            "versions": versions(),
            "sha256": {file: _digest(staging / file) for file in (MODEL, TRAINING)},
            **facts,
        }
        manifest["checksum"] = _checksum(manifest)
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for file in (MANIFEST, MODEL, TRAINING):
            _sync(staging / file)
        if folder.exists():
            old = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            staging.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            staging.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise QptError(
            f"the checkpoint {folder} cannot be written ({error}); what was there is untouched: make room, and add "
            "--resume to go on"
        ) from error
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, checked."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        way_out = f"; {EARLIER}" if NUMBERED.fullmatch(folder.name) else ""
        raise QptError(
            f"{folder} is not a checkpoint: {MANIFEST} cannot be read ({error.strerror}){way_out}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise QptError(f"the checkpoint {folder} is damaged: {MANIFEST} is not valid JSON; {EARLIER}") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise QptError(f"the checkpoint {folder} is damaged: {MANIFEST} has no format; {EARLIER}")
    if manifest["format"] != FORMAT:
        raise QptError(
            f"the checkpoint {folder} has format {manifest['format']}, this version of qpt reads {FORMAT}; "
            "use a matching version"
        )
    if "checksum" in manifest and manifest["checksum"] != _checksum(manifest):  # those of earlier versions have none
        raise QptError(f"the checkpoint {folder} is damaged: {MANIFEST} does not match its checksum; {EARLIER}")
    expected = NEEDED | {name: kind for name, kind in OF_A_RUN.items() if name in manifest}
    wrong = [name for name, kind in expected.items() if type(manifest.get(name)) is not kind]
    if wrong:
        raise QptError(f"the checkpoint {folder} is damaged: {MANIFEST} has no usable {', '.join(wrong)}; {EARLIER}")
    return manifest


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """What a checkpoint lacks, or has in a form that nothing here can take, gets a sentence."""
    try:
        yield
    except (TypeError, KeyError, ValueError, RuntimeError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split("\n", 2)[:2])
        raise QptError(
            f"the checkpoint {folder} does not fit this version of qpt: {reason}; use an earlier one"
        ) from error


def checksums(policy: Any) -> dict[str, str]:
    """Of the files that a policy was loaded from; none where it comes from no file that is known."""
    own = getattr(policy, "sha256", None)
    folder = Path(str(getattr(policy, "checkpoint", None) or MANIFEST))
    found = read_manifest(folder)["sha256"] if own is None and folder.is_dir() else own
    return dict(found or {})


def read_tensors(folder: Path, file: str, manifest: dict[str, Any]) -> dict[str, Tensor]:
    path = folder / file
    try:
        if _digest(path) != manifest["sha256"].get(file):
            raise QptError(f"the checkpoint {folder} is damaged: {file} does not match its checksum; {EARLIER}")
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise QptError(f"the checkpoint {folder} is damaged: {file} cannot be read ({error}); {EARLIER}") from error
    if file == MODEL:  # of critics nobody else would notice: every candidate fails a test against NaN
        for name, value in tensors.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise QptError(f"the checkpoint {folder} is damaged: {name} holds NaN or infinite values; {EARLIER}")
    return tensors


def load_algorithm(folder: Path, device: torch.device | str = "cpu") -> tuple[Any, dict[str, Any]]:
    """The algorithm of a checkpoint with its weights, and the manifest."""
    manifest = read_manifest(folder)
    with fitting(folder):
        try:
            cls, config_class = algorithm_classes(manifest["algorithm"])
            config = config_from(config_class, manifest["config"])
        except QptError as error:
            raise ValueError(error) from error
        algorithm = cls(config, Spec.from_json(manifest["spec"]))
        algorithm.load_state_dict(read_tensors(folder, MODEL, manifest))
    try:
        return algorithm.to(device), manifest
    except (RuntimeError, AssertionError) as error:  # no such device, or no room on it
        reason = str(error).splitlines()[0]
        raise QptError(f"the policy cannot be put on the device {str(device)!r} ({reason}); use cpu") from error


def restore_training(folder: Path, algorithm: Algorithm, manifest: dict[str, Any]) -> dict[str, Tensor]:
    """Put the optimisers back where they were; returns the other tensors of the training state (generators)."""
    tensors = read_tensors(folder, TRAINING, manifest)
    for name, optimizer in algorithm.optimizers.items():
        state = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index in range(len(parameters)):
            prefix = f"optimizer/{name}/{index}/"
            entry = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
            shape = parameters[index].shape
            if any(key.startswith("exp_avg") and value.shape != shape for key, value in entry.items()):
                raise ValueError(f"the optimiser {name} has moments of another shape than its weights")
            if entry:
                state["state"][index] = entry
        optimizer.load_state_dict(state)
        for place, group in enumerate(optimizer.param_groups):
            if f"lr/{name}/{place}" in tensors:
                group["lr"].copy_(tensors[f"lr/{name}/{place}"])
    return {key: value for key, value in tensors.items() if not key.startswith(("optimizer/", "lr/"))}


# -- run folders -------------------------------------------------------------------------------------------------------


def checkpoints(run: Path) -> list[Path]:
    """The step checkpoints of a run, oldest first; a copy beside them is not one of them."""
    return numbered(run, "step")


def numbered(run: Path, kind: str) -> list[Path]:
    """The checkpoints of a kind, "step" or "best", by their step."""
    try:
        found = [p for p in (run / "checkpoints").glob(f"{kind}-*") if NUMBERED.fullmatch(p.name) and p.is_dir()]
    except (OSError, ValueError):  # no name that a file system knows
        found = []
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def resolve(path: str | Path, which: str = "last") -> Path:
    """The checkpoint folder that `path` means: itself, or the last or best one of a run folder."""
    if not isinstance(path, str | os.PathLike):
        raise QptError(f"a run or a checkpoint is given by the path of its folder, not by {path!r}")
    path = expanded(path)
    if which not in ("last", "best"):
        raise QptError(f"which is 'last' or 'best', not {which!r}")
    if (path / MANIFEST).exists():
        if which == "best" and not path.name.startswith("best-"):
            raise QptError(f"{path} is one checkpoint; the best is looked for in the folder of its run")
        return path
    if not path.exists():
        raise QptError(f"there is no folder {path}; give a run folder or one of its checkpoints")
    if path.suffix == ".onnx":
        raise QptError(f"{path} is an exported policy, not a checkpoint; qpt.export.OnnxPolicy runs it")
    if which == "best":
        best = numbered(path, "best")
        if not best:
            raise QptError(
                f"the run {path} has no best checkpoint: it was not evaluated during training; use the last one"
            )
        return best[-1]
    steps = checkpoints(path)
    if not steps:
        raise QptError(f"{path} is neither a checkpoint nor a run with one; look for a folder with a {MANIFEST}")
    return steps[-1]


def rotate(run: Path, keep: int) -> None:
    """Delete all but the last `keep` step checkpoints."""
    for old in checkpoints(run)[: -keep or None]:
        shutil.rmtree(old, ignore_errors=True)


def sweep(run: Path) -> None:
    """Delete the checkpoints that a kill left half-written; for the one process that writes into this run."""
    for kind in ("step", "best"):
        for left in (run / "checkpoints").glob(f".{kind}-*"):
            if left.suffix == ".old" and not (whole := left.with_name(left.stem[1:])).exists():
                left.rename(whole)  # killed between moving it aside and putting the new one in its place
            else:
                shutil.rmtree(left, ignore_errors=True)


def _optimizer_tensors(algorithm: Algorithm) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, optimizer in algorithm.optimizers.items():
        for index, entry in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{name}/{index}/{key}": value for key, value in entry.items()}
        tensors |= {f"lr/{name}/{place}": group["lr"] for place, group in enumerate(optimizer.param_groups)}
    return tensors


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path)


def _checksum(manifest: dict[str, Any]) -> str:
    """Of all other entries, in their order, however the file is laid out."""
    others = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(others).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
