"""Names on the Hub: one that cannot be reached, one that does not exist, and missing files."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from pairs import raises_one_line, tiny_target

from eagle_fsd import CheckpointError
from eagle_fsd.model.drafters.loading import load_drafter
from eagle_fsd.model.hub import find_file
from eagle_fsd.model.loading import LoadError, load_embeddings, load_target, load_tokenizer
from eagle_fsd.model.target import Target

COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: Files on the server, by repository.
FILES = {"some/head": {"config.json": b"{}"}, "some/gguf": {"model.gguf": b""}}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Allow connections, and use an empty cache of downloads."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    huggingface_hub.close_session()  # it keeps connections and proxies


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let look-ups of host names fail, and do not wait."""

    def fail(*_args: object, **_options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    def wait(_seconds: float) -> None:
        raise AssertionError("a retry")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(time, "sleep", wait)


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub that serves :data:`FILES`."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        repository, _, file = self.path[1:].partition("/resolve/main/")
        content = FILES.get(repository, {}).get(file)
        self.send_response(404 if content is None else 200)
        if content is None:
            known = repository in FILES
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if content is not None and self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield
        server.shutdown()


@pytest.mark.usefixtures("no_network")
def test_without_a_network_an_unknown_name_raises_one_line_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for load, kind in (
        (lambda: load_drafter("nothere", Target(tiny_target())), CheckpointError),
        (lambda: load_target("nothere", device_map="cpu"), LoadError),
        (lambda: load_embeddings("nothere", device="cpu"), LoadError),
        (lambda: load_tokenizer("nothere"), LoadError),
    ):
        with raises_one_line(r"nothere.* cannot be reached .*Name or service", kind) as error:
            load()
        assert "no config.json" not in str(error.value)
    assert not caplog.text


@pytest.mark.usefixtures("hub")
def test_missing_files_and_missing_repositories_are_told_apart() -> None:
    target = Target(tiny_target())
    with pytest.raises(CheckpointError, match=r"some/head has neither model\.safetensors nor"):
        load_drafter("some/head", target)
    with pytest.raises(CheckpointError, match=r"no/head .*not a valid model identifier") as error:
        load_drafter("no/head", target)
    assert "reached" not in str(error.value)


def test_files_are_cached(hub: None, request: pytest.FixtureRequest) -> None:
    """Without a network, what is not in the cache is missing; nothing is retried."""
    found = find_file("some/head", "config.json")
    assert Path(found).read_bytes() == FILES["some/head"]["config.json"]
    assert find_file("some/head", "fsd.json") is None
    assert find_file("some/gguf", "config.json") is None
    huggingface_hub.close_session()
    request.getfixturevalue("no_network")
    assert find_file("some/head", "config.json") == found
    assert find_file("some/head", "fsd.json") is None  # as the server said
    assert find_file("some/head", "other.json") is None
    for name, file in (("other/head", "config.json"), ("some/gguf", "other.gguf")):
        with pytest.raises(ConnectionError, match=f"does not have {name}"):
            find_file(name, file)
    with raises_one_line(r"cannot be reached .* to list files of some/gguf", LoadError):
        load_target("some/gguf", device_map="cpu")
