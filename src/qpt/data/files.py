"""Data files: DSRL's HDF5 (as published, or compact), npz with the same keys, and Minari; a sentence for every defect.

A file is looked at before it is read: only plain datasets inside the file itself, of plain numbers, of a size that the
file can hold. Still, libhdf5 itself may hang or crash on a damaged file; `qpt.load_dataset` therefore has another
process look first (`qpt.data.validation`), and `read` is for files one trusts.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qpt.data.checks import (
    KEYS,
    OF_READING,
    OPTIONAL,
    check_column,
    check_present,
    check_size,
    clean,
    default_max_bytes,
    labelled,
    plain_value,
)
from qpt.data.hdf5 import check_chunks, check_layout, first_links, inside
from qpt.data.paths import expanded
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError, require
from qpt.writing import write_together

if TYPE_CHECKING:
    import h5py  # imported only where an HDF5 file is read or written: npz does without

_ATTRIBUTE_BYTES = 2**20
_INFO_BYTES = 2**26  # of an npz: lists with an entry for every episode are among it


def read(
    path: str | Path, *, cost_key: str | None = None, action_bound: float | None = 1.0, max_bytes: int | None = None
) -> Trajectories:
    """Read an HDF5 file in DSRL's layout, an npz file with the same keys, or the folder of a Minari data set.

    `cost_key` names the costs where they are not called "costs" (Minari: the key of infos, "cost" by default).
    `action_bound` is the largest magnitude of an action, None for any. More than `max_bytes` of data (by default:
    QPT_MAX_BYTES, or three quarters of the machine's memory) are refused before any is read.
    """
    path = expanded(path)
    with _defects(path):
        if path.is_dir():
            from qpt.data.minari import read_folder  # an optional extra

            return read_folder(path, cost_key=cost_key, action_bound=action_bound, max_bytes=max_bytes)
        kind = _kind(path)
        limit = default_max_bytes() if max_bytes is None else max_bytes
        if kind == "hdf5":
            with require("h5py").File(path, "r", locking="best-effort") as file:
                columns, info = _hdf5_columns(file, path.stat().st_size, limit, cost_key), _attributes(file)
                return _assemble(columns, {**info, "source": str(path)}, action_bound)
        arrays, info = _npz_columns(path, limit, cost_key)
        return _assemble(arrays, {**info, "source": str(path)}, action_bound)


def look(path: str | Path, *, cost_key: str | None = None, max_bytes: int | None = None) -> None:
    """All of `read` but the values: structure, sizes and notes of an HDF5 file, also Minari's; other kinds pass."""
    path = expanded(path)
    with _defects(path):
        limit = default_max_bytes() if max_bytes is None else max_bytes
        if path.is_dir():
            from qpt.data.minari import look_folder

            look_folder(path, limit)
        elif _kind(path) == "hdf5":
            with require("h5py").File(path, "r", locking="best-effort") as file:
                _hdf5_columns(file, path.stat().st_size, limit, cost_key)
                _attributes(file)


def check_ending(path: Path) -> None:
    """Refuse a name that does not say what to write."""
    if path.suffix.lower() not in (".hdf5", ".h5", ".npz"):
        raise QptError(f"{path.name} does not say what to write; give a name that ends in .hdf5 or .npz")


def write(trajectories: Trajectories, path: str | Path, compact: bool = False) -> Path:
    """Write HDF5 in DSRL's layout, or npz where the name ends so; an old file is replaced as a whole or not at all.

    The compact form stores the final observation of each episode instead of next_observations, about half the size.
    """
    return write_all([(trajectories, path)], compact)[0]


def write_all(parts: Sequence[tuple[Trajectories, str | Path]], compact: bool = False) -> list[Path]:
    """Write several files, and replace no old one before all are written: parts of a split must not overlap."""
    paths = [Path(os.path.realpath(expanded(path))) for _, path in parts]  # a link stays a link
    for path in paths:
        check_ending(path)
    contents = (_content(part, path, compact) for (part, _), path in zip(parts, paths, strict=True))  # one at a time
    return write_together(zip(paths, contents, strict=True))


def _content(trajectories: Trajectories, path: Path, compact: bool) -> bytes:
    columns = {name: getattr(trajectories, name) for name in (*KEYS, "timeouts")}
    if compact:
        columns["final_observations"] = trajectories.final_observations
    else:
        columns["next_observations"] = trajectories.next_observations()
    wrong = [key for key in trajectories.info if not isinstance(key, str) or not key]
    if wrong:
        raise QptError(
            f"the note {wrong[0]!r} (in info) cannot be written; the name of a note is a text of some length"
        )
    info = {key: value for key, value in trajectories.info.items() if key not in OF_READING}
    info |= {"num_trajectories": len(trajectories), "num_steps": trajectories.steps}
    info["layout"] = (
        "compact: final_observations, one row an episode, instead of next_observations" if compact else "DSRL"
    )
    return _npz_bytes(columns, info) if path.suffix.lower() == ".npz" else _hdf5_bytes(columns, info)


# -- from columns to trajectories --------------------------------------------------------------------------------------


def _assemble(columns: Mapping[str, Any], info: dict[str, Any], action_bound: float | None) -> Trajectories:
    """Read and check the columns: numpy arrays, or datasets that still lie on disk."""
    loaded = {name: _load(name, column) for name, column in columns.items() if name != "next_observations"}
    # Final observations are the shorter way to the same end; where both are given they serve.
    following = None if "final_observations" in columns else columns.get("next_observations")
    result = Trajectories.from_arrays(
        **{name: loaded[name] for name in KEYS},
        timeouts=loaded.get("timeouts"),
        next_observations=following,
        final_observations=loaded.get("final_observations"),
        action_bound=action_bound,
        info=info,
    )
    # Without timeouts, an episode that was cut off would silently run on into the next.
    if "timeouts" not in columns and ("dropped_steps" in result.info or "next_observations" in result.info):
        raise QptError(
            "timeouts is missing and not every episode ends by a terminal; add timeouts: 1 where an episode was cut off"
        )
    if not {"timeouts", "next_observations", "final_observations"} & set(columns):
        # Nothing in the file could show such an episode but an unfinished last one.
        told = "missing: an episode that was cut off would be one with the next, which cannot be seen"
        return replace(result, info={**result.info, "timeouts": told})
    return result


def _load(name: str, column: Any) -> npt.NDArray[Any]:
    if isinstance(column, np.ndarray):
        array = column
    elif name in ("terminals", "timeouts"):
        array = column[()]
    else:  # converted while it is read, so that float64 never lies in memory as a whole
        array = np.empty(column.shape, np.float32)
        if array.size:
            column.read_direct(array)
    array.flags.writeable = False  # nobody else holds it: Trajectories keeps it without a copy
    return array


# -- HDF5 --------------------------------------------------------------------------------------------------------------


def _hdf5_columns(file: h5py.File, file_size: int, limit: int, cost_key: str | None) -> dict[str, h5py.Dataset]:
    """The datasets of our keys, each looked at but not yet read."""
    import h5py

    names = {name: name for name in (*KEYS, *OPTIONAL)} | ({"costs": cost_key} if cost_key else {})
    columns = {name: found for name, key in names.items() if (found := inside(file, key)) is not None}
    check_present(set(columns), [name.decode(errors="replace") for name in first_links(file)], cost_key)
    total = 0
    for name, dataset in columns.items():
        if not isinstance(dataset, h5py.Dataset):
            raise QptError(f"{name} is a group or a type; it must be an array")
        check_layout(name, dataset)
        check_column(name, dataset.shape, dataset.dtype)
        total += math.prod(dataset.shape) * max(4, dataset.dtype.itemsize)
        check_chunks(name, dataset, file_size, limit)
    check_size("the data", total, file_size, limit)
    return columns


def _attributes(file: h5py.File) -> dict[str, Any]:
    """Notes and numbers at the root, made safe to print; references and compounds are passed over."""
    from h5py import check_string_dtype

    info: dict[str, Any] = {}
    for name in list(file.attrs)[:256]:
        attribute = file.attrs.get_id(name)
        text = check_string_dtype(attribute.dtype) is not None
        if attribute.shape is None or not (text or attribute.dtype.kind in "fiubS"):
            continue
        if math.prod(attribute.shape) * attribute.dtype.itemsize > _ATTRIBUTE_BYTES:
            raise QptError(f"the attribute {clean(name)!r} is absurdly large; the file is damaged")
        info[clean(name)] = plain_value(file.attrs[name])
    return labelled(info)


def _hdf5_bytes(columns: Mapping[str, npt.NDArray[Any]], info: Mapping[str, Any]) -> bytes:
    stored = {clean(name): plain for name, value in info.items() if (plain := _storable(value)) is not None}
    # The oldest layout has room for attributes of 64 KiB; lists with an entry for every episode may be longer.
    long = any(getattr(plain, "nbytes", 0) >= 60_000 for plain in stored.values())
    memory = {"driver": "core", "backing_store": False, "block_size": 2**22, "libver": "latest" if long else None}
    # Made in memory: libhdf5 does not survive a full disk well, and the rename needs all bytes first anyway.
    with require("h5py").File("memory", "w", **memory) as file:
        for name, values in columns.items():
            width = int(np.prod(values.shape[1:])) or 1
            chunk = (min(len(values), max(1, 2**17 // width)), *values.shape[1:])
            file.create_dataset(name, data=values, chunks=chunk, compression="gzip", compression_opts=4, shuffle=True)
        for name, plain in stored.items():
            file.attrs[name] = plain
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def _storable(value: Any) -> Any:
    plain = plain_value(value)
    if isinstance(plain, list):
        try:
            array = np.array([item.encode() if isinstance(item, str) else item for item in plain])
        except ValueError:  # ragged
            return None
        if array.dtype.kind not in "iub" and all(isinstance(item, int) for item in plain):  # more than 64 bits
            array = np.array([str(item).encode() for item in plain])
        return array if array.dtype.kind in "fiubS" and array.nbytes <= _ATTRIBUTE_BYTES else None
    return str(plain) if isinstance(plain, int) and not -(2**63) <= plain < 2**64 else plain


# -- npz ---------------------------------------------------------------------------------------------------------------


def _npz_columns(path: Path, limit: int, cost_key: str | None) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    names = {name: name for name in (*KEYS, *OPTIONAL)} | ({"costs": cost_key} if cost_key else {})
    with zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        check_present({name for name, key in names.items() if key in members}, list(members), cost_key)
        wanted = {name: members[key] for name, key in names.items() if key in members}
        total = sum(member.file_size for member in wanted.values()) + (
            members["info"].file_size if "info" in members else 0
        )
        check_size("the data", total, path.stat().st_size, limit)
        arrays = {name: _npy(archive, member, name) for name, member in wanted.items()}
        info: Any = {}
        if "info" in members:
            if members["info"].file_size > _INFO_BYTES:
                raise QptError("its notes (info) are absurdly large; the file is damaged")
            text = np.lib.format.read_array(io.BytesIO(archive.read(members["info"])), allow_pickle=False)
            if text.dtype == np.uint8 and text.ndim == 1:
                info = json.loads(text.tobytes())
            elif text.dtype.kind == "U" and text.ndim == 0:  # as written before
                info = json.loads(str(text))
    return arrays, labelled({clean(k): plain_value(v) for k, v in info.items()} if isinstance(info, dict) else {})


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> npt.NDArray[Any]:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in header:
            raise QptError(f"{name} has no header that can be read; save it again with numpy.savez")
        shape, fortran, dtype = header[version](file)
        check_column(name, shape, dtype)
        if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise QptError(f"{name} claims shape {list(shape)}, which is not what the file holds; it is damaged")
        content = file.read()
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C").copy(order="C")


def _npz_bytes(columns: Mapping[str, npt.NDArray[Any]], info: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    plain = {key: value for key, value in ((k, plain_value(v)) for k, v in info.items()) if value is not None}
    members: dict[str, Any] = {**columns, "info": np.frombuffer(json.dumps(plain).encode(), np.uint8)}
    np.savez_compressed(buffer, **members)
    return buffer.getvalue()


# -- small things ------------------------------------------------------------------------------------------------------


def _kind(path: Path) -> str:
    if not path.exists():
        raise QptError("there is no such file; check the path")
    if not path.is_file():
        raise QptError("this is not a file")
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise QptError("the file is empty; write or download it again")
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "hdf5"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "npz"
    if b"git-lfs" in head:
        raise QptError("this is a pointer of Git LFS, not the data; run: git lfs pull")
    if head.lstrip()[:5].lower() in (b"<html", b"<!doc"):
        raise QptError("this is a web page, not an HDF5 or npz file; download the data again")
    raise QptError(
        "this is neither an HDF5 nor an npz file; docs/bring-your-own-data.md shows how Trajectories.from_arrays and "
        "qpt.data.write make one of a CSV file or of arrays"
    )


@contextmanager
def _defects(path: Path) -> Iterator[None]:
    """Whatever goes wrong while reading becomes one sentence that names the file."""
    try:
        yield
    except QptError as error:
        raise QptError(clean(f"{path}: {error}", keep="")) from error
    except MemoryError as error:
        raise QptError(f"{path}: the data do not fit into memory") from error
    except PermissionError as error:
        raise QptError(f"{path}: there is no permission to read it") from error
    except BlockingIOError as error:  # libhdf5 locks what it writes
        raise QptError(f"{path}: another process has it open for writing; read it when that is done") from error
    except Exception as error:  # libhdf5, zipfile and numpy raise nearly every kind on damaged files
        text = str(error)
        found = re.search(r"error message = '([^']+)'", text) or re.search(r"\(([^()]*(?:truncated|eof)[^()]*)", text)
        reason = clean((found[1] if found else text).split("\n")[0], keep="")[:160] or type(error).__name__
        cut = "is cut short" if "truncated" in text else "is damaged"
        raise QptError(f"{path}: the file {cut} and cannot be read ({reason}); copy or download it again") from error
