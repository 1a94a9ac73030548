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
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from qpt.data.fetch import SIGNATURES, Progress, Refused, check_signature, discard, fetch, note_of
from qpt.data.paths import expanded, file_at
from qpt.errors import QptError
from qpt.tasks import Task

# -- where files are ---------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where downloads go: QPT_DATA_DIR, or ~/.cache/qpt/datasets."""
    return expanded(os.environ.get("QPT_DATA_DIR") or "~/.cache/qpt/datasets")


def collected_dir() -> Path:
    """Where `qpt collect record` puts the datasets of tasks, TASK.hdf5 each."""
    return cache_dir() / "collected"


def find_collected(task: Task) -> Path | None:
    """What was collected for the task, if anything."""
    return next((f for end in ("hdf5", "npz") if (f := file_at(collected_dir() / f"{task.name}.{end}"))), None)


def find_cached(task: Task) -> Path | None:
    """The task's file if it is at hand, in our cache or in DSRL's (DSRL_DATASET_DIR, ~/.dsrl/datasets)."""
    if task.data_file is None:
        return None
    named = (os.environ.get(name) for name in ("QPT_DATA_DIR", "DSRL_DATASET_DIR"))
    folders = [*filter(None, named), "~/.cache/qpt/datasets", "~/.dsrl/datasets"]
    # A folder that cannot be looked into is passed over: most commands can do without it.
    return next((found for folder in folders if (found := file_at(Path(folder) / task.data_file))), None)


def mirrors(task: Task, urls: Sequence[str] = ()) -> list[str]:
    """Where to try, in order: the given URLs, QPT_DATA_URL, those of the task. A URL that names no file is a folder."""
    name = _file_name(task)
    own = [*urls, *filter(None, [os.environ.get("QPT_DATA_URL")])]
    for url in [*own, *task.data_urls]:
        if not _is_web(url):
            raise QptError(f"{url!r} is not a web address; only http:// and https:// can be downloaded")
    found = [*(url if is_file_url(url) else _inside(url, name) for url in own), *task.data_urls]
    if not found:
        raise QptError(f"task {task.name!r} has no address to download from; give one with --url or QPT_DATA_URL")
    return list(dict.fromkeys(found))


def _inside(url: str, name: str) -> str:
    """The address of a file in a folder; what is asked of the folder (?token=1) is asked of the file."""
    parts = urlsplit(url)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}").geturl()


def _is_web(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        return False


def is_file_url(url: str) -> bool:
    """Whether a URL names a data file itself, and not a folder of them."""
    return Path(urlsplit(url).path).suffix.lower() in SIGNATURES


# -- the checksum ------------------------------------------------------------------------------------------------------


def verify(path: Path) -> bool:
    """Compare a file with its recorded sha256: True if it agrees; False where none was recorded, which is done then."""
    with _plain_errors(path):
        digest, known = _sha256(path), _recorded(path)
        if known is None:
            _check_found(path)
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
    at_hand = find_cached(task) if directory is None else file_at(Path(directory) / name)
    if at_hand is not None:
        with _plain_errors(at_hand):
            if _recorded(at_hand) is None:  # it did not come by us, or not whole
                _check_found(at_hand)
        return at_hand
    sources = mirrors(task, urls or ())
    path = cache_dir() / str(task.data_file) if directory is None else expanded(directory) / name
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
                    fetch(url, part, report, timeout, backoff)
                    _accept(part, path)
                except Refused as refusal:
                    if refusal.worthless:
                        discard(part)
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
        raise QptError(f"task {task.name!r} names no data file (data_file), so there is nothing to download")
    return Path(task.data_file).name


def _part_of(path: Path, url: str, alone: bool) -> Path:
    key = hashlib.sha256(url.encode()).hexdigest()[:8] + ("" if alone else f"-{os.getpid()}")
    return path.with_name(f"{path.stem}.{key}.part{path.suffix}")


def _accept(part: Path, path: Path) -> None:
    """Rename a complete download to its name, if it is what it should be."""
    _check_content(part)
    digest, known = _sha256(part), _recorded(path)
    if known is not None and digest != known:
        raise Refused(f"the file differs from the sha256 in {_record_of(path).name} of an earlier download", True)
    part.replace(path)
    note_of(part).unlink(missing_ok=True)
    if known is None:
        _record(path, digest)


def _check_found(path: Path) -> None:
    try:
        _check_content(path)
    except Refused as refusal:
        told = str(refusal).removeprefix("what came is not a sound data file: ")
        raise QptError(f"{path} is not a sound data file ({told}); delete it, and download it again") from refusal


def _check_content(part: Path) -> None:
    with part.open("rb") as file:
        check_signature(part, file.read(8).ljust(8))
    from qpt.data.validation import validate  # here, so that finding files imports little

    # In a process of its own: what came is not to be trusted with ours.
    defect = validate(part, action_bound=None)
    if defect is not None:
        raise Refused(f"what came is not a sound data file: {defect.removeprefix(f'{part}: ')}", True)


def _tidy(path: Path) -> None:
    """Remove what other mirrors left behind."""
    pattern = re.compile(re.escape(path.stem) + r"\.[0-9a-f]{8}\.part\.\w+")
    for file in path.parent.iterdir():
        if pattern.fullmatch(file.name):
            file.unlink(missing_ok=True)


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
