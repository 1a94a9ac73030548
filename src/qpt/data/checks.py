"""What every data file must fulfil before it is read, a sentence for each defect, and text that is safe to print."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.errors import QptError

KEYS = ("observations", "actions", "rewards", "costs", "terminals")  # a file needs all of these
OPTIONAL = ("timeouts", "next_observations", "final_observations")
OF_READING = ("source", "dropped_steps")  # entries of info said by the reader, not by the file
NOTICED = {  # entries of info that a user should hear of
    "dropped_steps": "steps after the last complete episode were dropped",
    "timeouts": "timeouts",
    "final_observations": "final observations",
    "next_observations": "next observations",
}
_TABLES = ("observations", "actions", "next_observations", "final_observations")  # rank 2; the others: 1, or [N, 1]
_RATIO = 1100  # gzip shrinks by 1032 at most
_SLACK = 2**20  # bytes; a chunk may be larger than the little that is in it


def check_continuous(actions: np.dtype[Any]) -> None:
    """Refuse class indices and one-hot rows, which would pass for numbers; floats may happen to be whole ones."""
    if actions.kind in "iub":
        raise QptError(
            f"actions are stored as {actions} and look like discrete ones; qpt is for continuous actions in [-1, 1], "
            "so store them as floats if that is what they are"
        )


def check_column(name: str, shape: tuple[int, ...] | None, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "fiub":
        what = {"O": "objects, strings or references", "S": "strings", "U": "strings", "V": "compound or opaque values"}
        raise QptError(f"{name} holds {what.get(dtype.kind, str(dtype))}; only plain numbers can be read")
    if name == "actions":
        check_continuous(dtype)
    if shape is None or len(shape) == 0:
        raise QptError(f"{name} is a single value or empty; it must have one row a step")
    if len(shape) > 2 or (name in _TABLES and len(shape) != 2):
        wanted = "[steps, columns]" if name in _TABLES else "[steps]"
        raise QptError(f"{name} has shape {list(shape)}; it must be {wanted}")


def check_present(names: set[str], others: list[str], cost_key: str | None) -> None:
    missing = [cost_key if cost_key and key == "costs" else key for key in KEYS if key not in names]
    if not missing:
        return
    if any(other.startswith("episode_") for other in others):
        raise QptError("this is the inner file of a Minari data set; give the folder of the data set instead")
    found = f"; it has {', '.join(sorted(others)[:12])}" if others else "; it is empty"
    if missing == ["costs"] and cost_key is None:
        found += " (if the costs have another name, give it: cost_key, or --cost-key NAME)"
    raise QptError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{found}")


def check_size(name: str, declared: int, file_size: int, limit: int) -> None:
    if declared > limit:
        raise QptError(
            f"{name} would take {_size(declared)} of memory and the limit is {_size(limit)}; "
            "if the file is to be trusted, raise QPT_MAX_BYTES"
        )
    if declared > _RATIO * file_size + _SLACK:
        raise QptError(
            f"{name} claims {_size(declared)} but the file has only {_size(file_size)}; it is damaged or a trap"
        )


# -- arrays ------------------------------------------------------------------------------------------------------------


def as_array(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise QptError(f"the rows of {name} differ in length; give every step as many values") from error


def as_floats(name: str, values: npt.ArrayLike, rank: int, first_row: int = 0) -> npt.NDArray[np.float32]:
    array = as_array(name, values)
    if array.dtype.kind not in "fiub":
        raise QptError(f"{name} holds {array.dtype} values; only numbers can be read")
    # Arrays that nobody else can change are kept; all others are copied.
    copy = array.flags.writeable or array.base is not None or array.dtype != np.float32
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, which is reported below
        array = np.array(array, np.float32, order="C", copy=copy or None)
    if rank == 1 and array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != rank:
        wanted = "[steps]" if rank == 1 else "[steps, columns]"
        raise QptError(f"{name} has shape {list(array.shape)}; it must be {wanted}")
    bad = ~np.isfinite(array)
    if bad.any():
        row = first_row + int(np.argwhere(bad)[0, 0])
        raise QptError(
            f"{name} holds {int(bad.sum())} NaN or infinite values, the first in row {row}; "
            "remove or repair those episodes"
        )
    return array


def as_flags(name: str, values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    array = as_array(name, values)
    if array.dtype.kind not in "fiub":
        raise QptError(f"{name} holds {array.dtype} values; only true/false or 0/1 can be read")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise QptError(f"{name} has shape {list(array.shape)}; it must be [steps]")
    if array.dtype != bool and not np.isin(array, (0, 1)).all():
        raise QptError(f"{name} holds values other than 0 and 1; it marks the steps that end an episode")
    return array.astype(bool)


# -- notes and sizes ---------------------------------------------------------------------------------------------------


def noticed(info: Mapping[str, Any]) -> list[str]:
    """What reading noticed that is no defect, each as a part of a sentence."""
    return [f"{what}: {clean(str(info[key]))}" for key, what in NOTICED.items() if key in info]


def labelled(info: dict[str, Any]) -> dict[str, Any]:
    for key in OF_READING:
        info.pop(key, None)
    marked = info.pop("surrogate", False)  # True, or 1 as other programs than h5py write it
    if (isinstance(marked, int | float) and marked == 1) or "surrogate" in str(info.get("note", "")).lower():
        info["surrogate"] = True
    return info


def default_max_bytes() -> int:
    """QPT_MAX_BYTES, or three quarters of the memory of this machine (64 GiB where that is not known)."""
    text = os.environ.get("QPT_MAX_BYTES")
    if text:
        if not text.isdecimal():
            raise QptError(f"QPT_MAX_BYTES must be a whole number of bytes, not {text!r}")
        return int(text)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4
    except (AttributeError, ValueError, OSError):
        return 64 * 2**30


def clean(text: str, keep: str = "\n\t") -> str:
    """Safe to print: no control characters, no half characters."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)


def plain_value(value: Any) -> Any:
    """Python's own numbers, strings and lists of them; None for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return value if isinstance(value, bool | int | float) else None


def _size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count //= 1024
    return f"{count:,} TiB"
