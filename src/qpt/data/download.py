"""Downloading data files: resumed, checked, written under a temporary name and renamed; mirrors are tried in order.

Files beside NAME.hdf5 in the folder:
  NAME.<url>.part.hdf5   what has arrived so far, one for each mirror, so that bytes of two mirrors are never mixed
  NAME.<url>.part.json   the mirror's ETag and length, without which a download is not resumed
  NAME.hdf5.sha256       recorded when the file first came, as `sha256sum -c` reads it; later copies must agree
  NAME.hdf5.lock         held while downloading: a second process waits for it and then finds the finished file
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from qpt.errors import QptError
from qpt.tasks import Task

Progress = Callable[[str, int, int | None], None]  # what is going on, bytes so far, bytes in all if known

_CHUNK = 1 << 18
_SIGNATURES = {".hdf5": b"\x89HDF\r\n\x1a\n", ".h5": b"\x89HDF\r\n\x1a\n", ".npz": b"PK\x03\x04"}
_FRUITLESS = 4  # attempts in a row that bring a mirror no further
_ATTEMPTS = 100  # in all, for a mirror that gives a little each time


class _Refused(Exception):
    """This mirror will not do; try the next."""

    def __init__(self, reason: str, worthless: bool = False) -> None:
        super().__init__(reason)
        self.worthless = worthless  # nothing that came is to be resumed


class _Cut(Exception):
    """The connection failed; the same mirror may well go on."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait  # what the server asks for, in seconds


# -- where files are ---------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where downloads go: QPT_DATA_DIR, or ~/.cache/qpt/datasets."""
    return Path(os.environ.get("QPT_DATA_DIR") or "~/.cache/qpt/datasets").expanduser()


def find_cached(task: Task) -> Path | None:
    """The task's file if it is at hand, in our cache or in DSRL's (DSRL_DATASET_DIR, ~/.dsrl/datasets)."""
    if task.data_file is None:
        return None
    named = (os.environ.get(name) for name in ("QPT_DATA_DIR", "DSRL_DATASET_DIR"))
    folders = [*filter(None, named), "~/.cache/qpt/datasets", "~/.dsrl/datasets"]
    files = (Path(folder).expanduser() / task.data_file for folder in folders)
    return next((file for file in files if file.is_file()), None)


def mirrors(task: Task, urls: Sequence[str] = ()) -> list[str]:
    """Where to try, in order: the given URLs, QPT_DATA_URL, those of the task. A URL that names no file is a folder."""
    name = _file_name(task)
    own = [*urls, *filter(None, [os.environ.get("QPT_DATA_URL")])]
    for url in [*own, *task.data_urls]:
        if not _is_web(url):
            raise QptError(f"{url!r} is not a web address; only http:// and https:// can be downloaded")
    found = [*(url if is_file_url(url) else f"{url.rstrip('/')}/{quote(name)}" for url in own), *task.data_urls]
    if not found:
        raise QptError(f"task {task.name!r} has no address to download from; give one with --url or QPT_DATA_URL")
    return list(dict.fromkeys(found))


def _is_web(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        return False


def is_file_url(url: str) -> bool:
    """Whether a URL names a data file itself, and not a folder of them."""
    return Path(urlsplit(url).path).suffix.lower() in _SIGNATURES


# -- the checksum ------------------------------------------------------------------------------------------------------


def verify(path: Path) -> bool:
    """Compare a file with its recorded sha256: True if it agrees; False where none was recorded, which is done then."""
    with _plain_errors(path):
        digest, known = _sha256(path), _recorded(path)
        if known is None:
            _record(path, digest)
        elif digest != known:
            raise QptError(
                f"{path} differs from the sha256 recorded when it came; delete it and download it again, "
                f"or delete {_record_of(path).name} too if the change is meant"
            )
    return known is not None


def _record_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _recorded(path: Path) -> str | None:
    try:
        words = _record_of(path).read_text(encoding="utf-8", errors="replace").split()
    except FileNotFoundError:
        return None
    if not words or len(words[0]) != 64:
        raise QptError(f"{_record_of(path)} holds no sha256; delete it to have it recorded anew")
    return words[0].lower()


def _record(path: Path, digest: str) -> None:
    temporary = path.with_name(f"{path.name}.sha256.{os.getpid()}")
    temporary.write_text(f"{digest}  {path.name}\n", encoding="utf-8")
    temporary.replace(_record_of(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- downloading -------------------------------------------------------------------------------------------------------


def download(
    task: Task,
    *,
    urls: Sequence[str] | None = None,
    directory: str | Path | None = None,
    progress: Progress | None = None,
    timeout: float = 30.0,
    backoff: float = 1.0,
) -> Path:
    """The task's data file, downloaded unless it is at hand already; `urls` are tried before the task's own.

    Each mirror is resumed after a cut connection, with pauses that double from `backoff` seconds; `timeout` is how long
    a silent connection is waited for.
    """
    name = _file_name(task)
    at_hand = find_cached(task) if directory is None else Path(directory).expanduser() / name
    if at_hand is not None and at_hand.is_file():
        return at_hand
    sources = mirrors(task, urls or ())
    path = (cache_dir() if directory is None else Path(directory).expanduser()) / name
    report: Progress = progress or (lambda *_: None)
    with _plain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path, report) as alone:
            if path.is_file():  # another process was faster
                return path
            failures = []
            for url in sources:
                part = _part_of(path, url, alone)
                try:
                    _fetch(url, part, report, timeout, backoff)
                    _accept(part, path)
                except _Refused as refusal:
                    if refusal.worthless:
                        _discard(part)
                    failures.append(f"{urlsplit(url).hostname}: {refusal}")
                    continue
                if alone:
                    _tidy(path)
                return path
    raise QptError(
        f"{name} could not be downloaded ({'; '.join(failures)}); "
        f"run it again to go on, give a mirror with --url or QPT_DATA_URL, or put the file into {path.parent}"
    )


def _file_name(task: Task) -> str:
    if task.data_file is None:
        raise QptError(f"task {task.name!r} names no data file; give its file with --data")
    return Path(task.data_file).name


def _part_of(path: Path, url: str, alone: bool) -> Path:
    key = hashlib.sha256(url.encode()).hexdigest()[:8] + ("" if alone else f"-{os.getpid()}")
    return path.with_name(f"{path.stem}.{key}.part{path.suffix}")


def _accept(part: Path, path: Path) -> None:
    """Rename a complete download to its name, if it is what it should be."""
    _check_content(part)
    digest, known = _sha256(part), _recorded(path)
    if known is not None and digest != known:
        raise _Refused(f"the file differs from the sha256 in {_record_of(path).name} of an earlier download", True)
    part.replace(path)
    _note_of(part).unlink(missing_ok=True)
    if known is None:
        _record(path, digest)


def _check_content(part: Path) -> None:
    with part.open("rb") as file:
        _check_signature(part, file.read(8).ljust(8))
    from qpt.data.validation import validate  # here, so that finding files imports little

    # In a process of its own: what came is not to be trusted with ours.
    defect = validate(part, action_bound=None)
    if defect is not None:
        raise _Refused(f"what came is not a sound data file: {defect.removeprefix(f'{part}: ')}", True)


def _check_signature(part: Path, start: bytes) -> None:
    signature = _SIGNATURES.get(part.suffix.lower(), b"")
    if start[: len(signature)] != signature[: len(start)]:
        what = "a web page" if start.lstrip()[:1] == b"<" else "something else"
        raise _Refused(f"what came is not a data file but {what}", True)


# -- one mirror --------------------------------------------------------------------------------------------------------


def _fetch(url: str, part: Path, report: Progress, timeout: float, backoff: float) -> None:
    """Bring `part` to its full length, as long as attempts bring it further."""
    fruitless, furthest = 0, _size(part)
    for _ in range(_ATTEMPTS):
        try:
            return _attempt(url, part, report, timeout)
        except _Cut as cut:
            fruitless = 0 if _size(part) > furthest else fruitless + 1
            furthest = max(furthest, _size(part))
            if fruitless >= _FRUITLESS:
                raise _Refused(str(cut)) from cut
            pause = max(backoff * 2**fruitless, min(cut.wait, 60.0))
            report(f"{cut}; trying again in {pause:.0f} s", _size(part), None)
            time.sleep(pause)
    raise _Refused("the connection was cut too often")


def _attempt(url: str, part: Path, report: Progress, timeout: float) -> None:
    host = str(urlsplit(url).hostname)
    note = _read_note(part)
    have = _size(part) if note else 0  # without a note nothing says that the rest would belong to it
    if have and have == note.get("total"):
        return  # all of it had come; only the renaming was missed
    headers = {"User-Agent": "qpt", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": str(note["validator"])}
    with _open(url, headers, timeout, part) as response:
        if have and response.status == 206:
            total = _resumed_total(response, have, note, part)
        else:  # a fresh start, a changed file or a server that knows no ranges
            have, total = 0, _length(response)
            _write_note(part, _validator(response), total)
        _check_room(part, (total or 0) - have)
        report(host, have, total)
        with part.open("ab" if have else "wb") as file:
            start = b""
            while have != total and (chunk := _read(response, _CHUNK if total is None else min(_CHUNK, total - have))):
                if have == len(start) < 8:  # a fresh file: do not fetch gigabytes of something else
                    start = (start + chunk)[:8]
                    _check_signature(part, start)
                file.write(chunk)
                have += len(chunk)
                report(host, have, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have != total:
        raise _Cut(f"the connection was cut after {have:,} of {total:,} bytes")


def _open(url: str, headers: dict[str, str], timeout: float, part: Path) -> http.client.HTTPResponse:
    # urllib's own opener would follow a redirection to ftp://; this one knows http and https alone.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    try:
        response: http.client.HTTPResponse = opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # more is there than the server has
            _discard(part)
            raise _Cut("the file on the server became shorter") from error
        answer = f"the server answers {error.code} {error.reason}"
        if error.code in (408, 425, 429) or error.code >= 500:
            wait = error.headers.get("Retry-After", "") if error.headers else ""
            raise _Cut(answer, float(wait) if wait.isdecimal() else 0.0) from error
        raise _Refused(answer) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _network_error(error) from error


def _read(response: http.client.HTTPResponse, most: int) -> bytes:
    try:
        return response.read1(most)  # what is there, so that a stall loses nothing that came before it
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _network_error(error) from error


def _network_error(error: Exception) -> _Refused | _Cut:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    match reason:
        case socket.gaierror():
            return _Refused("the host is unknown, or there is no network")
        case ssl.SSLCertVerificationError():
            return _Refused(f"its certificate cannot be trusted ({reason.verify_message})")
        case http.client.InvalidURL() | ValueError() | str():
            return _Refused(f"the address cannot be used ({reason})")
        case TimeoutError():
            return _Cut("the server fell silent")
        case ConnectionRefusedError():
            return _Cut("the server takes no connections")
        case _:
            return _Cut(f"the connection was cut ({type(reason).__name__})")


def _length(response: http.client.HTTPResponse) -> int | None:
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() and not response.headers.get("Transfer-Encoding") else None


def _validator(response: http.client.HTTPResponse) -> str | None:
    etag = response.headers.get("ETag", "")
    strong = etag if etag.startswith('"') else None  # a weak one does not promise equal bytes
    return strong or response.headers.get("Last-Modified")


def _resumed_total(response: http.client.HTTPResponse, have: int, note: dict[str, object], part: Path) -> int | None:
    """The whole length, if the server goes on exactly where we stopped."""
    unit, _, span = response.headers.get("Content-Range", "").partition(" ")
    start, _, rest = span.partition("-")
    total = rest.partition("/")[2]
    known = note.get("total")
    if unit != "bytes" or start != str(have) or (known is not None and total not in ("*", str(known))):
        _discard(part)
        raise _Cut("the server sent another part of the file than was asked for")
    return int(total) if total.isdecimal() else known if isinstance(known, int) else None


# -- small things ------------------------------------------------------------------------------------------------------


def _note_of(part: Path) -> Path:
    return part.with_suffix(".json")


def _read_note(part: Path) -> dict[str, object]:
    try:
        note = json.loads(_note_of(part).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("validator"), str) else {}


def _write_note(part: Path, validator: str | None, total: int | None) -> None:
    part.unlink(missing_ok=True)  # first, so that old bytes never meet the new note
    if validator is None:
        _note_of(part).unlink(missing_ok=True)
    else:
        _note_of(part).write_text(json.dumps({"validator": validator, "total": total}), encoding="utf-8")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _note_of(part).unlink(missing_ok=True)


def _tidy(path: Path) -> None:
    """Remove what other mirrors left behind."""
    pattern = re.compile(re.escape(path.stem) + r"\.[0-9a-f]{8}\.part\.\w+")
    for file in path.parent.iterdir():
        if pattern.fullmatch(file.name):
            file.unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_room(part: Path, wanted: int) -> None:
    if wanted > shutil.disk_usage(part.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))


@contextlib.contextmanager
def _lock(path: Path, report: Progress) -> Iterator[bool]:
    """Hold the file's lock; yields whether we are alone. Without locks each process writes a part of its own."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    # The lock file stays: were it deleted, a waiting and a new process could hold locks on two different files.
    with path.with_name(path.name + ".lock").open("w") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("waiting for another process that downloads it", 0, None)
                fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError:  # a file system without locks
            alone = False
        yield alone


@contextlib.contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """The disk's troubles as one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QptError(
                f"the disk of {path.parent} is too full for {path.name}; make room or set QPT_DATA_DIR"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise QptError(
                f"there is no permission to use {error.filename or path.parent}; set QPT_DATA_DIR to a folder of yours"
            ) from error
        raise QptError(
            f"{error.filename or path} cannot be used ({error.strerror or error}); set QPT_DATA_DIR to another folder"
        ) from error
