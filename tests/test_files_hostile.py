"""Damaged and hostile files, each read in a process of its own, with limits: one sentence or good data, nothing else.

As a script it reads mutants number FIRST to FIRST + COUNT - 1 and prints one JSON line each.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from qpt.data.files import read
from qpt.data.validation import look_first, validate
from qpt.errors import QptError

SECONDS = 15  # for one file; they take milliseconds
MAX_BYTES = 2**26
GROWTH_KB = 300_000  # of memory while a file is read, whatever the process held before


# -- the files that are damaged ----------------------------------------------------------------------------------------


def columns(rng: np.random.Generator, episodes: int = 3, length: int = 12) -> dict[str, np.ndarray]:
    n = episodes * length
    ends = np.arange(1, n + 1) % length == 0
    return {
        "observations": rng.normal(size=(n, 3)).astype(np.float32),
        "next_observations": rng.normal(size=(n, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (n, 2)).astype(np.float32),
        "rewards": rng.normal(size=n).astype(np.float32),
        "costs": rng.integers(0, 2, n).astype(np.float32),
        "terminals": np.zeros(n, bool),
        "timeouts": ends,
    }


def hdf5(arrays: dict[str, np.ndarray], libver: str = "earliest", **storage: Any) -> bytes:
    with h5py.File("memory", "w", driver="core", backing_store=False, libver=(libver, "latest")) as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, **storage)
        file.attrs["note"] = "surrogate of something"
        file.attrs["seeds"] = np.arange(5)
        file.attrs["names"] = ["a", "bc"]
        file.create_group("metadata").create_dataset("x", data=1.0)
        file.flush()
        return bytes(file.id.get_file_image())


def originals() -> list[bytes]:
    rng = np.random.default_rng(0)
    arrays = columns(rng)
    wide = {k: v.astype(np.float64)[:, None] if v.ndim == 1 else v.astype(np.float64) for k, v in arrays.items()}
    stored, packed = io.BytesIO(), io.BytesIO()
    np.savez(stored, **arrays, info=np.array(json.dumps({"note": "surrogate"})))
    np.savez_compressed(packed, **arrays)
    return [
        hdf5(arrays),
        hdf5(wide, chunks=True, compression="gzip", shuffle=True),
        hdf5(arrays, libver="latest", chunks=True, compression="gzip", shuffle=True),
        hdf5(arrays, libver="latest", maxshape=None),
        hdf5(wide, chunks=True, compression="lzf", fletcher32=True),
        stored.getvalue(),
        packed.getvalue(),
    ]


def mutant(number: int, pool: list[bytes]) -> bytes:
    rng = np.random.default_rng(number)
    data = bytearray(pool[number % len(pool)])
    for _ in range(rng.integers(1, 4)):
        # Most of the structure lies at the beginning or, in zip files, at the end.
        at = int(
            rng.choice(
                [
                    rng.integers(len(data)),
                    rng.integers(min(len(data), 1200)),
                    len(data) - 1 - rng.integers(min(len(data), 400)),
                ]
            )
        )
        match int(rng.integers(7)):
            case 0:
                data[at] ^= 1 << int(rng.integers(8))
            case 1:
                data[at] = int(rng.integers(256))
            case 2:
                value = int(rng.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1, len(data)]))
                data[at : at + 8] = struct.pack("<Q", value)
            case 3:
                data = data[: max(at, 1)]
            case 4:
                other = pool[int(rng.integers(len(pool)))]
                size, start = int(rng.integers(1, 200)), int(rng.integers(len(other)))
                data[at : at + size] = other[start : start + size]
            case 5:
                data[at : at + int(rng.integers(1, 64))] = bytes(int(rng.integers(1, 64)))
            case 6:
                start = int(rng.integers(len(data)))
                data[at : at + 8] = data[start : start + 8]
    return bytes(data)


# -- reading them ------------------------------------------------------------------------------------------------------


def outcome(path: Path) -> dict[str, Any]:
    """Fork, read, and tell how it ended."""
    out, into = os.pipe()
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024  # a fork begins there
    child = os.fork()
    if child == 0:
        os.close(out)
        signal.alarm(SECONDS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            data = read(path, max_bytes=MAX_BYTES)
            assert len(data) >= 1
            assert np.isfinite(data.observations).all()
            answer = {"kind": "read"}
        except QptError as error:
            answer = {"kind": "sentence", "text": str(error)}
        except BaseException as error:
            answer = {"kind": "traceback", "text": repr(error)}
        os.write(into, json.dumps(answer).encode()[:4000])
        os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(child, 0)
    if os.WIFSIGNALED(status):
        answer = {"kind": "hang" if os.WTERMSIG(status) == signal.SIGALRM else "crash"}
    else:
        answer = json.loads(text)
    return {**answer, "growth_kb": usage.ru_maxrss - held}


def sweep(first: int, count: int, folder: Path) -> Counter[str]:
    """Read the mutants in a process with nothing else in it, and judge what it prints."""
    command = [sys.executable, __file__, str(first), str(count), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS * 10 + count, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["number"] for row in rows] == list(range(first, first + count))
    for row in rows:
        assert row["kind"] != "traceback", row
        if row["kind"] == "sentence":
            judge(row["text"])
        if row["kind"] in ("crash", "hang") or row["growth_kb"] > GROWTH_KB:
            # libhdf5's own doing; whoever does not trust a file asks `validate`, and lives.
            row["kind"] = "harm"
            path = folder / f"mutant-{row['number']}"
            path.write_bytes(mutant(row["number"], originals()))
            judge(validate(path, max_bytes=MAX_BYTES, timeout=SECONDS) or "")
            with pytest.raises(QptError):  # and so does `load_dataset`, which has another process look first
                look_first(path, timeout=SECONDS)
    return Counter(row["kind"] for row in rows)


def judge(text: str) -> None:
    assert 20 < len(text) < 500, text
    assert "\n" not in text
    assert "Traceback" not in text
    assert text.isprintable()


def test_mutants(tmp_path: Path) -> None:
    kinds = sweep(0, 350, tmp_path)
    assert kinds["sentence"] > 120  # the mutations do damage
    assert kinds["read"] > 20  # and not only to the signature
    assert kinds["harm"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 11_000, 1_000))
def test_many_mutants(first: int, tmp_path: Path) -> None:
    assert sweep(first, 1_000, tmp_path)["harm"] <= 3


# -- files made to do harm ---------------------------------------------------------------------------------------------


def hostile(path: Path, what: str) -> None:
    """A good file with one thing made wrong."""
    arrays = columns(np.random.default_rng(1))
    n = len(arrays["rewards"])
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            if name != "costs":
                file.create_dataset(name, data=values, chunks=True, compression="gzip")
        costs = arrays["costs"]
        elsewhere = path.with_name("elsewhere.hdf5")
        match what:
            case "external link":
                with h5py.File(elsewhere, "w") as other:
                    other["costs"] = costs
                file["costs"] = h5py.ExternalLink(elsewhere.name, "/costs")
            case "soft link out":
                with h5py.File(elsewhere, "w") as other:
                    other["costs"] = costs
                file["away"] = h5py.ExternalLink(elsewhere.name, "/")
                file["costs"] = h5py.SoftLink("/away/costs")
            case "dangling link":
                file["costs"] = h5py.SoftLink("/nowhere")
            case "link to itself":
                file["costs"] = h5py.SoftLink("/costs")
            case "external storage":
                path.with_name("raw.bin").write_bytes(costs.tobytes())
                file.create_dataset("costs", (n,), "f4", external=[(path.with_name("raw.bin"), 0, n * 4)])
            case "virtual":
                with h5py.File(elsewhere, "w") as other:
                    other["costs"] = costs
                layout = h5py.VirtualLayout((n,), "f4")
                layout[:] = h5py.VirtualSource(elsewhere, "costs", (n,))
                file.create_virtual_dataset("costs", layout)
            case "a trillion rows":
                file.create_dataset("costs", (10**12,), "f4", chunks=(1000,), compression="gzip")
            case "a trillion rows of all":
                for name in arrays:
                    file.pop(name, None)
                    width = (2,) if arrays[name].ndim == 2 else ()
                    file.create_dataset(name, (10**12, *width), "f4", chunks=(1000, *width), compression="gzip")
            case "zeros packed small":
                file.create_dataset("costs", (2**31,), "f4", chunks=(2**22,), compression="gzip")
            case "huge chunk":
                file.create_dataset("costs", (n,), "f4", maxshape=(None,), chunks=(2**29,), compression="gzip")
            case "chunk bomb" | "chunk bomb twice":
                bomb = zlib.compress(bytes(2**26), 9)
                kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                kind.set_chunk((n,))
                kind.set_deflate(9)
                if what.endswith("twice"):
                    kind.set_deflate(9)
                    bomb = zlib.compress(zlib.compress(bytes(2**26), 9), 9)
                space = h5py.h5s.create_simple((n,))
                made = h5py.h5d.create(file.id, b"costs", h5py.h5t.IEEE_F32LE, space, kind)
                made.write_direct_chunk((0,), bomb)
            case "scale-offset filter":
                file.create_dataset("costs", data=costs, chunks=(n,), scaleoffset=2)
            case "unknown filter":
                kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                kind.set_chunk((n,))
                kind.set_filter(32123, h5py.h5z.FLAG_OPTIONAL, ())
                h5py.h5d.create(file.id, b"costs", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((n,)), kind)
            case "strings":
                file.create_dataset("costs", data=np.array([b"1"] * n))
            case "variable strings":
                file.create_dataset("costs", data=["1"] * n, dtype=h5py.string_dtype())
            case "ragged":
                file.create_dataset("costs", (n,), dtype=h5py.vlen_dtype(np.float32))
            case "less than a checksum":
                made = file.create_dataset("costs", (n,), "f4", chunks=(n,), fletcher32=True)
                made.id.write_direct_chunk((0,), b"abc")
            case "references":
                file.create_dataset("costs", (n,), dtype=h5py.ref_dtype)
            case "compound":
                file.create_dataset("costs", (n,), dtype=[("a", "f4"), ("b", "i4")])
            case "opaque":
                file.create_dataset("costs", data=np.zeros(n, "V8"))
            case "complex":
                file.create_dataset("costs", data=np.zeros(n, np.complex64))
            case "a group":
                file.create_group("costs")
            case "a type":
                file["costs"] = np.dtype("f4")
            case "a scalar":
                file["costs"] = 1.0
            case "null":
                file.create_dataset("costs", data=h5py.Empty("f4"))
            case "rank 3":
                file["costs"] = costs[:, None, None]
            case "two columns":
                file["costs"] = np.stack([costs, costs], 1)
            case "no rows":
                file["costs"] = costs[:0]
            case "one row less":
                file["costs"] = costs[:-1]
            case _:
                raise AssertionError(what)


SENTENCES = {
    "external link": "link to another place",
    "soft link out": "link to another place",
    "dangling link": "link to another place",
    "link to itself": "link to another place",
    "external storage": "stored outside the file",
    "virtual": "virtual dataset",
    "a trillion rows": "limit is",
    "a trillion rows of all": "limit is",
    "zeros packed small": "limit is",
    "huge chunk": "chunk of costs",
    "chunk bomb twice": "same filter twice",
    "scale-offset filter": "HDF5 filter 6",
    "unknown filter": "HDF5 filter 32123",
    "strings": "holds strings",
    "variable strings": "strings",
    "ragged": "objects",
    "less than a checksum": "costs has a part with nothing in it",
    "references": "references",
    "compound": "compound",
    "opaque": "opaque",
    "complex": "plain numbers",
    "a group": "must be an array",
    "a type": "must be an array",
    "a scalar": "single value",
    "null": "single value",
    "rank 3": "shape [36, 1, 1]",
    "two columns": "shape [36, 2]",
    "no rows": "costs has 0 rows",
    "one row less": "costs has 35 rows",
}


@pytest.mark.parametrize("what", SENTENCES)
def test_hostile(what: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.hdf5"
    hostile(path, what)
    found = outcome(path)
    assert found["kind"] == "sentence", found
    assert SENTENCES[what] in found["text"], found
    assert str(path) in found["text"]
    assert found["growth_kb"] < GROWTH_KB
    judge(found["text"].replace(str(path), "file"))


@pytest.mark.parametrize("kind", ["external", "soft"])
def test_no_part_of_a_cost_key_leads_out_of_the_file(kind: str, tmp_path: Path) -> None:
    path, arrays = tmp_path / "a.hdf5", columns(np.random.default_rng(1))
    with h5py.File(tmp_path / "elsewhere.hdf5", "w") as other:
        other["deep/cost"] = arrays["costs"]
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
        file["within/cost"] = arrays["costs"]
        file["away"] = h5py.ExternalLink("elsewhere.hdf5", "/") if kind == "external" else h5py.SoftLink("/within")
    for key in ("away/cost", "away/deep/cost"):
        with pytest.raises(QptError, match=f"{key} is a link to another place"):
            read(path, cost_key=key)


def test_the_claim_is_compared_with_the_file(tmp_path: Path) -> None:
    """Also where the limit would allow it: a small file cannot hold gigabytes."""
    path = tmp_path / "hostile.hdf5"
    hostile(path, "zeros packed small")
    with pytest.raises(QptError, match="claims 8 GiB but the file has only"):
        read(path, max_bytes=2**40)


def test_a_chunk_that_unpacks_to_more_than_it_should(tmp_path: Path) -> None:
    path = tmp_path / "hostile.hdf5"
    hostile(path, "chunk bomb")
    found = outcome(path)
    assert found["kind"] in ("read", "sentence")
    assert found["growth_kb"] < GROWTH_KB


def test_zip_bomb(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    arrays = columns(np.random.default_rng(1))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, values in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, values)
            content = buffer.getvalue() + (bytes(2**27) if name == "costs" else b"")
            archive.writestr(f"{name}.npy", content)
    found = outcome(path)
    assert found["kind"] == "sentence"
    assert "limit is" in found["text"]
    with pytest.raises(QptError, match="costs claims shape"):
        read(path, max_bytes=2**40)


def test_npz_header_that_lies(tmp_path: Path) -> None:
    path = tmp_path / "lie.npz"
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)})
    arrays = columns(np.random.default_rng(1))
    np.savez(path, **{k: v for k, v in arrays.items() if k != "costs"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("costs.npy", buffer.getvalue())
    with pytest.raises(QptError, match="claims shape"):
        read(path)


def test_npz_objects_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    arrays: dict[str, Any] = {**columns(np.random.default_rng(1)), "costs": np.array([Trap()] * 36, dtype=object)}
    np.savez(tmp_path / "trap.npz", **arrays)
    with pytest.raises(QptError, match="objects"):
        read(tmp_path / "trap.npz")
    assert not (tmp_path / "sprung").exists()


def test_control_characters_of_attributes_are_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "odd.hdf5"
    path.write_bytes(hdf5(columns(np.random.default_rng(1))))
    with h5py.File(path, "a") as file:
        file.attrs["note"] = "surrogate \x1b[2J of \x07 it"
        file.attrs["bytes"] = np.bytes_(b"\xff\xfe")
    note = read(path).info["note"]
    assert "surrogate" in note
    assert note.isprintable()


@pytest.mark.parametrize("name", ["pipe", "folder", "missing", "device"])
def test_what_is_not_a_file(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    path = Path("/dev/zero") if name == "device" else tmp_path / name
    found = outcome(path)
    assert found["kind"] == "sentence"


# -- validate ----------------------------------------------------------------------------------------------------------


def test_validate_survives_a_crash_and_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is made to crash or hang by a sitecustomize of its own."""
    path = tmp_path / "good.hdf5"
    path.write_bytes(hdf5(columns(np.random.default_rng(1))))
    assert validate(path) is None
    trap = tmp_path / "trap"
    trap.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(trap))
    (trap / "usercustomize.py").write_text("")
    for code, sentence in (
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "signal 11"),
        ("import time\ntime.sleep(60)\n", "more than 2 seconds"),
        ("import os\nos._exit(3)\n", "exit code 3"),
    ):
        (trap / "sitecustomize.py").write_text(code)
        found = validate(path, timeout=2)
        assert found is not None
        assert sentence in found
        judge(found)


def test_validate_limits_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.npz"
    np.savez(path, **columns(np.random.default_rng(1), episodes=1000))
    assert validate(path) is None
    found = validate(path, max_bytes=100_000)
    assert found is not None
    assert "limit is 97 KiB" in found


if __name__ == "__main__":
    start, number_of, place = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    originals_ = originals()
    for index in range(start, start + number_of):
        file_ = place / "mutant"
        file_.write_bytes(mutant(index, originals_))
        print(json.dumps({"number": index, **outcome(file_)}), flush=True)
