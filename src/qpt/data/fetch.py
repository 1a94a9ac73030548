"""One file from one address into a part file: resumed after a cut connection, as long as attempts bring it further."""

from __future__ import annotations

import errno
import http.client
import json
import os
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from qpt.data.checks import default_max_bytes

Progress = Callable[[str, int, int | None], None]  # what is going on, bytes so far, bytes in all if known

_CHUNK = 1 << 18
SIGNATURES = {".hdf5": b"\x89HDF\r\n\x1a\n", ".h5": b"\x89HDF\r\n\x1a\n", ".npz": b"PK\x03\x04"}
_FRUITLESS = 4  # attempts in a row that bring a mirror no further
_ATTEMPTS = 100  # in all, for a mirror that gives a little each time


class Refused(Exception):
    """This mirror will not do; try the next."""

    def __init__(self, reason: str, worthless: bool = False) -> None:
        super().__init__(reason)
        self.worthless = worthless  # nothing that came is to be resumed


class Cut(Exception):
    """The connection failed; the same mirror may well go on."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait  # what the server asks for, in seconds


def fetch(url: str, part: Path, report: Progress, timeout: float, backoff: float) -> None:
    """Bring `part` to its full length, as long as attempts bring it further."""
    try:
        _fetch(url, part, report, timeout, backoff)
    except BaseException:
        if not _read_note(part):  # nothing would ever resume it
            discard(part)
        raise


def _fetch(url: str, part: Path, report: Progress, timeout: float, backoff: float) -> None:
    fruitless, furthest = 0, _size(part)
    for _ in range(_ATTEMPTS):
        try:
            return _attempt(url, part, report, timeout)
        except Cut as cut:
            fruitless = 0 if _size(part) > furthest else fruitless + 1
            furthest = max(furthest, _size(part))
            if fruitless >= _FRUITLESS:
                raise Refused(str(cut)) from cut
            pause = max(backoff * 2**fruitless, min(cut.wait, 60.0))
            report(f"{cut}; trying again in {pause:.0f} s", _size(part), None)
            time.sleep(pause)
    raise Refused("the connection was cut too often")


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
            write_note(part, _validator(response), total)
        _check_room(part, (total or 0) - have)
        report(host, have, total)
        with part.open("ab" if have else "wb") as file:
            start, most = b"", default_max_bytes()
            while have != total and (chunk := _read(response, _CHUNK if total is None else min(_CHUNK, total - have))):
                if have == len(start) < 8:  # a fresh file: do not fetch gigabytes of something else
                    start = (start + chunk)[:8]
                    check_signature(part, start)
                if total is None and have + len(chunk) > most:
                    raise Refused(f"it goes on after {most:,} bytes and says no length; see QPT_MAX_BYTES", True)
                file.write(chunk)
                have += len(chunk)
                report(host, have, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have != total:
        raise Cut(f"the connection was cut after {have:,} of {total:,} bytes")


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
            discard(part)
            raise Cut("the file on the server became shorter") from error
        answer = f"the server answers {error.code} {error.reason}"
        if error.code in (408, 425, 429) or error.code >= 500:
            wait = error.headers.get("Retry-After", "") if error.headers else ""
            raise Cut(answer, float(wait) if wait.isdecimal() else 0.0) from error
        raise Refused(answer) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _network_error(error) from error


def _read(response: http.client.HTTPResponse, most: int) -> bytes:
    try:
        return response.read1(most)  # what is there, so that a stall loses nothing that came before it
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _network_error(error) from error


def _network_error(error: Exception) -> Refused | Cut:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    match reason:
        case socket.gaierror():
            return Refused("the host is unknown, or there is no network")
        case ssl.SSLCertVerificationError():
            return Refused(f"its certificate cannot be trusted ({reason.verify_message})")
        case http.client.InvalidURL() | ValueError() | str():
            return Refused(f"the address cannot be used ({reason})")
        case TimeoutError():
            return Cut("the server fell silent")
        case ConnectionRefusedError():
            return Cut("the server takes no connections")
        case _:
            return Cut(f"the connection was cut ({type(reason).__name__})")


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
        discard(part)
        raise Cut("the server sent another part of the file than was asked for")
    return int(total) if total.isdecimal() else known if isinstance(known, int) else None


# -- what has come so far ---------------------------------------------------------------------------------------------


def note_of(part: Path) -> Path:
    return part.with_suffix(".json")


def _read_note(part: Path) -> dict[str, object]:
    try:
        note = json.loads(note_of(part).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("validator"), str) else {}


def write_note(part: Path, validator: str | None, total: int | None) -> None:
    part.unlink(missing_ok=True)  # first, so that old bytes never meet the new note
    if validator is None:
        note_of(part).unlink(missing_ok=True)
    else:
        note_of(part).write_text(json.dumps({"validator": validator, "total": total}), encoding="utf-8")


def discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    note_of(part).unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_room(part: Path, wanted: int) -> None:
    if wanted > shutil.disk_usage(part.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))


def check_signature(part: Path, start: bytes) -> None:
    signature = SIGNATURES.get(part.suffix.lower(), b"")
    if start[: len(signature)] != signature[: len(start)]:
        what = "a web page" if start.lstrip()[:1] == b"<" else "something else"
        raise Refused(f"what came is not a data file but {what}", True)
