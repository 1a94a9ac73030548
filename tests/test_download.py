"""Downloads from a server that truncates, stalls, lies and serves garbage."""

from __future__ import annotations

import errno
import hashlib
import io
import multiprocessing
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from qpt.cli.data_download import download as command
from qpt.data import download as room
from qpt.data import validation
from qpt.data.download import cache_dir, download, find_cached, mirrors, verify
from qpt.data.fetch import write_note
from qpt.data.files import read
from qpt.errors import QptError
from qpt.tasks import Task

NAME = "Toy-v0-10-20.hdf5"


def dsrl_file(seed: int = 0, steps: int = 20_000) -> bytes:
    """A sound file in DSRL's layout, of about 1.5 MB."""
    rng, buffer = np.random.default_rng(seed), io.BytesIO()
    with h5py.File(buffer, "w") as file:
        observations = rng.normal(size=(steps, 8)).astype(np.float32)
        file["observations"] = observations
        file["next_observations"] = np.roll(observations, -1, 0)
        file["actions"] = rng.uniform(-1, 1, size=(steps, 2)).astype(np.float32)
        file["rewards"] = rng.normal(size=steps).astype(np.float32)
        file["costs"] = (rng.uniform(size=steps) < 0.1).astype(np.float32)
        file["terminals"] = np.zeros(steps, bool)
        file["timeouts"] = np.arange(steps) % 100 == 99
    return buffer.getvalue()


CONTENT = dsrl_file()
REAL_VALIDATE = validation.validate


def defect_of(path: Path) -> str | None:
    try:
        read(path)
    except QptError as error:
        return str(error)
    return None


class Server(ThreadingHTTPServer):
    """Serves `content` at every path; `trouble(handler, n)` may answer the n-th request instead (True: it did)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.etag, self.ranges, self.length_header = CONTENT, '"one"', True, True
        self.trouble: Callable[[Handler, int], bool] = lambda *_: False
        self.requests: list[dict[str, str]] = []
        self.gate = threading.Event()  # stalls wait for it, so that no thread outlives a test
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away; that is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests.append({**{k.lower(): v for k, v in self.headers.items()}, "path": self.path})
            n = len(self.server.requests)
        if self.server.trouble(self, n):
            return
        self.answer()

    def answer(self, *, send: int | None = None, claim: int | None = None, content: bytes | None = None) -> None:
        """The content, or its asked-for part; only `send` bytes of it; with a Content-Length of `claim`."""
        content = self.server.content if content is None else content
        start, asked = 0, self.headers.get("Range")
        fresh = self.headers.get("If-Range") in (None, self.server.etag)
        if self.server.ranges and asked and fresh:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{claim or len(content)}")
        else:
            self.send_response(200)
        if self.server.length_header:
            self.send_header("Content-Length", str((claim or len(content)) - start))
        if self.server.etag:
            self.send_header("ETag", self.server.etag)
        self.end_headers()
        self.wfile.write(content[start:][:send])
        self.wfile.flush()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a home of the test's own."""
    for name in ("DSRL_DATASET_DIR", "QPT_DATA_URL", "QPT_TASKS", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(validation, "validate", lambda path, **_: defect_of(path))  # a process for each would be slow
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QPT_DATA_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def toy(*urls: str) -> Task:
    return Task("Toy", data_file=NAME, data_urls=urls)


def fetch(server: Server, **options: Any) -> Path:
    options = {"timeout": 5.0, "backoff": 0.01, **options}
    return download(toy(f"{server.url}/{NAME}"), **options)


def leftovers(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if ".part." in file.name)


# -- what goes well ----------------------------------------------------------------------------------------------------


def test_a_file_comes_with_its_checksum_and_is_not_fetched_twice(server: Server, folder: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = fetch(server, progress=lambda *step: seen.append(step))
    assert path == folder / NAME
    assert path.read_bytes() == CONTENT
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert (folder / f"{NAME}.sha256").read_text() == f"{digest}  {NAME}\n"
    assert leftovers(folder) == []
    done = [step[1] for step in seen]
    assert done == sorted(done)
    assert done[-1] == len(CONTENT) == seen[-1][2]
    assert fetch(server) == path
    assert len(server.requests) == 1


def test_a_cut_connection_is_resumed_where_it_stopped(server: Server, folder: Path) -> None:
    def trouble(handler: Handler, n: int) -> bool:
        if n <= 7:  # more cuts than fruitless attempts are allowed: each brings it further
            handler.answer(send=150_000)
        return n <= 7

    server.trouble = trouble
    assert fetch(server).read_bytes() == CONTENT
    starts = [request.get("range") for request in server.requests]
    assert starts == [None, *(f"bytes={150_000 * n}-" for n in range(1, 8))]
    assert {request.get("if-range") for request in server.requests[1:]} == {'"one"'}
    assert leftovers(folder) == []


def test_a_later_call_resumes_what_an_earlier_one_left(server: Server, folder: Path) -> None:
    server.trouble = lambda handler, n: (
        bool(handler.answer(send=400_000) if n == 1 else handler.send_error(503)) or True
    )
    with pytest.raises(QptError, match="503"):
        fetch(server)
    assert len(leftovers(folder)) == 2
    before = len(server.requests)
    server.trouble = lambda *_: False
    assert fetch(server).read_bytes() == CONTENT
    assert [r.get("range") for r in server.requests[before:]] == ["bytes=400000-"]


def test_a_download_that_was_only_not_renamed_is_taken_as_it_is(server: Server) -> None:
    path = fetch(server)
    part = room._part_of(path, f"{server.url}/{NAME}", True)
    write_note(part, '"one"', len(CONTENT))
    path.rename(part)
    assert fetch(server).read_bytes() == CONTENT
    assert len(server.requests) == 1


@pytest.mark.parametrize("how", ["no ranges", "no etag", "weak etag"])
def test_without_safe_ranges_it_starts_over(server: Server, how: str) -> None:
    server.ranges = how != "no ranges"
    server.etag = {"no etag": "", "weak etag": 'W/"one"'}.get(how, server.etag)
    server.trouble = lambda handler, n: n == 1 and (handler.answer(send=300_000) or True)
    assert fetch(server).read_bytes() == CONTENT
    assert ("range" in server.requests[1]) == (how == "no ranges")


def test_a_file_that_changed_between_two_tries_is_not_spliced(server: Server) -> None:
    other = dsrl_file(seed=1)

    def trouble(handler: Handler, n: int) -> bool:
        if n == 1:
            handler.answer(send=300_000)
            server.content, server.etag = other, '"two"'
        return n == 1

    server.trouble = trouble
    assert fetch(server).read_bytes() == other
    assert server.requests[1]["if-range"] == '"one"'


def test_a_server_that_ignores_if_range_is_caught_by_the_length(server: Server) -> None:
    other = dsrl_file(seed=1, steps=21_000)

    def trouble(handler: Handler, n: int) -> bool:
        if n == 1:
            handler.answer(send=300_000)
        elif n == 2:  # goes on with other content, as if nothing had happened
            server.content = other
            handler.answer()
        return n <= 2

    server.trouble = trouble
    assert fetch(server).read_bytes() == other
    assert "range" not in server.requests[2]


def test_a_file_without_a_length_is_read(server: Server) -> None:
    server.length_header = False
    assert fetch(server).read_bytes() == CONTENT


def test_a_file_without_a_length_and_without_an_end_is_refused(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.length_header = False
    monkeypatch.setenv("QPT_MAX_BYTES", str(len(CONTENT) - 1))
    with pytest.raises(QptError, match=r"goes on after [\d,]+ bytes and says no length; see QPT_MAX_BYTES"):
        fetch(server)
    assert leftovers(folder) == []


@pytest.mark.parametrize("pieces", [17, 3])
def test_a_chunked_answer_is_read_and_resumed(server: Server, pieces: int) -> None:
    """17 pieces are the whole file; 3 of them stop without the chunk that says: that was all."""

    def trouble(handler: Handler, n: int) -> bool:
        if n == 1:
            handler.protocol_version = "HTTP/1.1"
            handler.close_connection = True
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.send_header("ETag", server.etag)
            handler.end_headers()
            for start in range(0, len(CONTENT), 100_000)[:pieces]:
                piece = CONTENT[start : start + 100_000]
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if pieces * 100_000 >= len(CONTENT):
                handler.wfile.write(b"0\r\n\r\n")
        return n == 1

    server.trouble = trouble
    assert fetch(server).read_bytes() == CONTENT
    assert [r.get("range") for r in server.requests] == ([None] if pieces == 17 else [None, "bytes=300000-"])


def test_a_stalled_connection_is_dropped_and_resumed(server: Server) -> None:
    def trouble(handler: Handler, n: int) -> bool:
        if n == 1:
            handler.answer(send=200_000)
            server.gate.wait(30)
        return n == 1

    server.trouble = trouble
    assert fetch(server, timeout=0.3).read_bytes() == CONTENT
    assert server.requests[1]["range"] == "bytes=200000-"


def test_a_busy_server_is_asked_again(server: Server) -> None:
    server.trouble = lambda handler, n: n <= 2 and (handler.send_error(503 if n == 1 else 429) or True)
    assert fetch(server).read_bytes() == CONTENT
    assert len(server.requests) == 3


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_a_length_that_is_never_reached_is_an_error(server: Server, folder: Path, ranges: bool) -> None:
    server.ranges = ranges
    server.trouble = lambda handler, _: handler.answer(claim=len(CONTENT) + 1000) or True
    with pytest.raises(QptError, match="could not be downloaded"):
        fetch(server)
    assert not (folder / NAME).exists()
    assert len(server.requests) < 20


def test_a_length_that_is_too_short_gives_no_file(server: Server, folder: Path) -> None:
    server.trouble = lambda handler, _: handler.answer(claim=len(CONTENT) - 5000) or True
    with pytest.raises(QptError, match="not a sound data file"):
        fetch(server)
    assert not (folder / NAME).exists()
    assert leftovers(folder) == []


@pytest.mark.parametrize("garbage", [b"<!DOCTYPE html><p>Sorry", b"\x00" * 5000, b"", b"\x89HD"])
def test_garbage_is_refused_and_leaves_nothing(server: Server, folder: Path, garbage: bytes) -> None:
    server.content = garbage
    with pytest.raises(QptError, match="not a data file" + (" but a web page" if garbage[:1] == b"<" else "")):
        fetch(server)
    assert not (folder / NAME).exists()
    assert leftovers(folder) == []
    assert len(server.requests) == 1


def test_a_signature_before_garbage_is_refused(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "validate", REAL_VALIDATE)
    server.content = CONTENT[:8] + b"\x01" * 50_000
    with pytest.raises(QptError, match="not a sound data file"):
        fetch(server)
    assert leftovers(folder) == []
    server.content = CONTENT
    assert fetch(server).read_bytes() == CONTENT


def test_the_next_mirror_is_tried(server: Server, folder: Path) -> None:
    server.trouble = lambda handler, n: n == 1 and (handler.send_error(404) or True)
    own = f"{server.url}/mine"  # a folder: the file's name is added
    path = download(toy(f"{server.url}/theirs/{NAME}"), urls=[own], timeout=5, backoff=0.01)
    assert path.read_bytes() == CONTENT
    assert [r["path"] for r in server.requests] == [f"/mine/{NAME}", f"/theirs/{NAME}"]
    assert leftovers(folder) == []


def test_bytes_of_two_mirrors_are_not_mixed(server: Server) -> None:
    other = dsrl_file(seed=1)

    def trouble(handler: Handler, n: int) -> bool:
        if handler.path.startswith("/first"):
            if n == 1:
                handler.answer(send=300_000)
            else:
                handler.send_error(404)
            return True
        handler.answer(content=other)
        return True

    server.trouble = trouble
    path = download(toy(f"{server.url}/first/{NAME}", f"{server.url}/second/{NAME}"), timeout=5, backoff=0.01)
    assert path.read_bytes() == other


def test_a_copy_that_differs_from_the_recorded_one_is_refused(server: Server, folder: Path) -> None:
    path = fetch(server)
    path.unlink()
    server.content = dsrl_file(seed=1)
    with pytest.raises(QptError, match="differs from the sha256"):
        fetch(server)
    assert not path.exists()
    (folder / f"{NAME}.sha256").unlink()
    assert fetch(server).read_bytes() == server.content


def test_verify_tells_a_changed_file(server: Server, folder: Path) -> None:
    path = fetch(server)
    assert verify(path)
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(QptError, match="differs from the sha256"):
        verify(path)
    (folder / f"{NAME}.sha256").unlink()
    assert not verify(path)  # recorded now
    assert verify(path)


def test_an_unknown_host_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(QptError, match=r"nowhere\.example: the host is unknown") as caught:
        download(toy(f"http://nowhere.example/{NAME}"))
    assert "\n" not in str(caught.value)


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(QptError, match="takes no connections"):
            download(toy(f"http://127.0.0.1:{free.getsockname()[1]}/{NAME}"), backoff=0.001)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://host/x.hdf5", "/a/path.hdf5", "http:///x.hdf5", "http://[/x.hdf5", "C:\\x"]
)
def test_only_web_addresses_are_taken(url: str) -> None:
    with pytest.raises(QptError, match="only http:// and https://"):
        download(toy(), urls=[url])


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/x.hdf5"])
def test_a_redirection_cannot_leave_the_web(server: Server, target: str) -> None:
    def trouble(handler: Handler, _: int) -> bool:
        handler.send_response(302)
        handler.send_header("Location", target)
        handler.end_headers()
        return True

    server.trouble = trouble
    with pytest.raises(QptError, match="could not be downloaded"):
        fetch(server)


def test_a_redirection_keeps_the_range(server: Server) -> None:
    def trouble(handler: Handler, n: int) -> bool:
        if not handler.path.startswith("/moved"):
            handler.send_response(302)
            handler.send_header("Location", f"/moved/{NAME}")
            handler.end_headers()
            return True
        if n == 2:
            handler.answer(send=250_000)
        return n == 2

    server.trouble = trouble
    assert fetch(server).read_bytes() == CONTENT
    assert server.requests[-1]["range"] == "bytes=250000-"


def test_a_full_disk_is_one_sentence(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(QptError, match="too full"):
        fetch(server)
    assert not (folder / NAME).exists()


def test_a_disk_that_fills_up_meanwhile_is_one_sentence(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(QptError, match="too full"):
        fetch(server)
    assert len(leftovers(folder)) == 2  # the part and its note, to go on with
    shutil.rmtree(folder)
    server.etag = ""
    with pytest.raises(QptError, match="too full"):
        fetch(server)
    assert leftovers(folder) == []  # without a note nothing could go on


def test_no_permission_is_one_sentence(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(QptError, match=r"no permission.*QPT_DATA_DIR"):
        fetch(server)


def test_a_folder_that_is_a_file_is_one_sentence(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QptError, match="cannot be used"):
        fetch(server, directory=tmp_path / "file" / "cache")


def test_tasks_without_a_file_or_an_address_say_so() -> None:
    with pytest.raises(QptError, match="names no data file"):
        download(Task("Own"))
    with pytest.raises(QptError, match="no address"):
        download(toy())


# -- two at once -------------------------------------------------------------------------------------------------------


def _fetch_elsewhere(url: str, folder: str) -> None:
    path = download(Task("Toy", data_file=NAME, data_urls=(url,)), directory=folder, timeout=20, backoff=0.01)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("locks", [True, False])
def test_two_processes_at_once_do_no_harm(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:  # as on a file system without them
        import fcntl

        def unsupported(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", unsupported)

    def trouble(handler: Handler, n: int) -> bool:
        if n == 1:  # cut in the middle, after the other has surely begun
            handler.answer(send=500_000)
            server.gate.wait(0.3)
        return n == 1

    server.trouble = trouble
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=_fetch_elsewhere, args=(f"{server.url}/{NAME}", str(folder))) for _ in range(3)]
    for process in others:
        process.start()
    for process in others:
        process.join(60)
    assert [process.exitcode for process in others] == [0, 0, 0]
    assert (folder / NAME).read_bytes() == CONTENT
    assert leftovers(folder) == []
    if locks:
        assert len(server.requests) == 2  # the first and its resumption; the others found the file


# -- where files are ---------------------------------------------------------------------------------------------------


def test_caches_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, task = tmp_path / "home", toy()
    folders = [home / ".dsrl/datasets", home / ".cache/qpt/datasets", tmp_path / "dsrl", tmp_path / "cache"]
    monkeypatch.setenv("DSRL_DATASET_DIR", str(folders[2]))
    assert find_cached(task) is None
    for folder in folders:  # each goes before those already there
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NAME).write_bytes(CONTENT)
        assert find_cached(task) == folder / NAME
    assert download(task) == folders[3] / NAME  # found, so nothing is fetched
    assert cache_dir() == folders[3]
    monkeypatch.delenv("QPT_DATA_DIR")
    assert cache_dir() == folders[1]
    assert find_cached(Task("Own")) is None


def test_mirrors_are_ordered_and_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QPT_DATA_URL", "http://env.example/data/")
    task = toy("http://a.example/x.hdf5", f"http://env.example/data/{NAME}")
    assert mirrors(task, ["http://own.example/y.hdf5?download=true"]) == [
        "http://own.example/y.hdf5?download=true",
        f"http://env.example/data/{NAME}",
        "http://a.example/x.hdf5",
    ]
    assert mirrors(toy(), ["https://own.example/folder/?sv=1&sig=a/b"]) == [
        f"https://own.example/folder/{NAME}?sv=1&sig=a/b",
        f"http://env.example/data/{NAME}",
    ]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_tasks(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tasks.toml"
    file.write_text(
        f'[[task]]\nname = "DownA"\ndata_file = "a.hdf5"\ndata_urls = ["{server.url}/a.hdf5"]\n'
        f'[[task]]\nname = "DownB"\ndata_file = "b.hdf5"\ndata_urls = ["{server.url}/b.hdf5"]\n'
    )
    monkeypatch.setattr("qpt.tasks._registered", {})
    monkeypatch.setenv("QPT_TASKS", str(file))


@pytest.mark.usefixtures("two_tasks")
def test_the_command_tries_all_and_tells_failure(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.trouble = lambda handler, _: handler.path == "/a.hdf5" and (handler.send_error(404) or True)
    assert command(("DownA", "DownB")) == 1
    captured = capsys.readouterr()
    assert (folder / "b.hdf5").read_bytes() == CONTENT
    assert str(folder / "b.hdf5") in captured.out
    assert "404" in captured.err
    server.trouble = lambda *_: False
    assert command(("DownA", "DownB"), verify=True) == 0
    (folder / "a.hdf5").write_bytes(b"changed")
    capsys.readouterr()
    assert command(("DownA", "DownB"), verify=True) == 1
    assert "differs" in capsys.readouterr().err


@pytest.mark.usefixtures("two_tasks")
def test_half_a_file_is_neither_taken_nor_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / "a.hdf5"
    half.write_bytes(CONTENT[:300_000])  # as another program may have left it
    for checked in (False, True):
        assert command(("DownA",), verify=checked) == 1
        assert "delete it, and download it again" in capsys.readouterr().err
    half.unlink()
    assert command(("DownA",), verify=True) == 0
    assert half.read_bytes() == CONTENT


def test_a_file_in_a_folder_is_found_where_it_was_put(server: Server, folder: Path) -> None:
    task = Task("Inner", data_file="inner/a.hdf5", data_urls=(f"{server.url}/a.hdf5",))
    assert download(task) == folder / "inner/a.hdf5" == find_cached(task)


@pytest.mark.usefixtures("two_tasks")
def test_the_command_refuses_what_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QptError, match="name at least one task"):
        command(())
    with pytest.raises(QptError, match="one file"):
        command(("DownA", "DownB"), url="http://host/a.hdf5")
    with pytest.raises(QptError, match="no task"):
        command(("Dwon",))
    monkeypatch.setenv("QPT_DATA_URL", "http://host/a.hdf5")
    with pytest.raises(QptError, match="QPT_DATA_URL names one file"):
        command(("DownA", "DownB"))
