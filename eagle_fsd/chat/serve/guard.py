"""The ASGI guard in front of every server.

A web page in the user's browser can send requests to servers on the same machine. The guard
therefore rejects requests whose ``Host`` is not a name of the server (DNS rebinding), whose
``Origin`` is another site, and bodies that are not declared as JSON, which browsers send to other
sites without a preflight request. It also checks keys before it reads a body, bounds bodies in size
and time, and answers exceptions without a traceback. It tells the application which client a
request is from: the owner of a key, or else an address.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

#: Environment variable with the keys that clients may use, separated by commas. It is not an option
#: because other users can read a process's arguments.
API_KEYS_VARIABLE = "EAGLE_FSD_API_KEYS"
#: Routes that need no key: they tell only whether a server is running, and how busy it is.
OPEN_ROUTES = ("/health", "/ready")
#: Files of the web page, which asks its visitors for a key.
PAGE_ROUTES = ("/", "/page.css", "/page.js")
#: Maximum number of seconds that a client may take to send a request body.
BODY_TIMEOUT = 30.0

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(:(?P<port>\d{1,5}))?", re.I)
_UNIQUE_HEADERS = (b"host", b"origin", b"authorization", b"content-type", b"content-length")
_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def api_keys() -> tuple[str, ...]:
    """Return the API keys from the environment."""
    keys = os.environ.get(API_KEYS_VARIABLE, "").split(",")
    return tuple(key.strip() for key in keys if key.strip())


@dataclass(frozen=True)
class Access:
    """Who may use a server.

    ``hosts`` are names of the server, beside those of this machine, that requests may have in their
    ``Host`` header. If there are ``keys``, requests must send one of them: as a bearer token, or as
    the password of any user; ``/health``, ``/ready``, the files of a ``page`` and preflight
    requests need none. ``origins`` are other sites whose web pages may send requests.
    """

    hosts: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    page: bool = False
    origins: tuple[str, ...] = ()


#: Requires no key, and trusts this machine's names.
ANYONE = Access()


def _detail(message: str, status: int) -> dict[str, Any]:
    return {"detail": message}


class Guard:
    """ASGI middleware in front of a server.

    Request bodies have at most ``max_body`` bytes. ``error_body`` builds the body of an error
    response from its message and HTTP status. The application finds the client in the state of the
    scope, as ``client``.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access = ANYONE,
        max_body: int = 1 << 20,
        error_body: Callable[[str, int], dict[str, Any]] = _detail,
    ) -> None:
        self.app, self.access, self.max_body = app, access, max_body
        self.error_body = error_body
        self._entrance: ASGIApp = self._guard
        if access.origins:
            self._entrance = CORSMiddleware(
                self._guard,
                allow_origins=access.origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),  # OpenAI's client adds headers of its own
                expose_headers=("x-request-id", "x-eagle-fsd-acceptance"),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a connection; see the ASGI specification for the arguments."""
        await self._entrance(scope, receive, send)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a WebSocket that is not accepted is closed
        sent, started = dict(scope["headers"]), False
        given = sent.get(b"x-request-id", b"")
        identifier = given if _REQUEST_ID.fullmatch(given) else token_hex(16).encode()

        async def tracked_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = [*message.get("headers", ()), (b"x-request-id", identifier)]
                message = {**message, "headers": headers}
            await send(message)

        try:
            client = self._check(scope, sent)
            scope.setdefault("state", {})["client"] = client  # also for the connection
            receive = await self._read(scope, sent, receive)
            await self.app(scope, receive, tracked_send)
        except HTTPException as error:
            body = self.error_body(error.detail, error.status_code)
            response = JSONResponse(body, error.status_code, error.headers)
            await response(scope, receive, tracked_send)
        except ClientDisconnect:
            pass
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                body = self.error_body("the request failed", 500)
                await JSONResponse(body, 500)(scope, receive, tracked_send)

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Return the client; raise HTTPException unless the request's head is acceptable."""
        if len(headers) < len(scope["headers"]) and _is_ambiguous(scope["headers"]):
            raise HTTPException(400, "headers that identify a request must not be repeated")
        host = headers.get(b"host", b"").decode("latin-1")
        match = _HOST.fullmatch(host)
        if match is None or not self._is_own_name(match["name"], scope.get("server")):
            message = f"the Host header must name this server; got {host!r}: see --trusted-hosts"
            raise HTTPException(421, message)
        origin = headers.get(b"origin", b"").decode("latin-1")
        own = b"origin" not in headers or _is_same_site(origin, match)
        if not own and origin not in self.access.origins:
            raise HTTPException(403, "requests from other sites' web pages are not allowed")
        key = self._key(headers)
        reads_page = scope["method"] in ("GET", "HEAD") and scope["path"] in PAGE_ROUTES
        public = scope["path"] in OPEN_ROUTES or (self.access.page and reads_page)
        if self.access.keys and key is None and not public:
            # Not Basic: browsers would ask for a password before the page can.
            challenge = {"WWW-Authenticate": 'Bearer realm="eagle-fsd", charset="UTF-8"'}
            raise HTTPException(401, "a valid key is required", challenge)
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if _has_body(headers) and kind != b"application/json":
            raise HTTPException(415, "the Content-Type must be application/json")
        address = scope.get("client")
        return key or (address[0] if address else "")

    def _is_own_name(self, name: str, server: tuple[str, int | None] | None) -> bool:
        """Return whether a host is this machine, the address of ``server``, or a trusted name."""
        name = name.strip("[]").rstrip(".").lower()
        if name in own_names() or name in (item.lower() for item in self.access.hosts):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or (server is not None and str(address) == server[0])

    def _key(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the key of the request, or None; keys are compared in constant time."""
        scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
        value = value.strip()
        if scheme.lower() == b"basic":
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif scheme.lower() != b"bearer":
            return None
        matches = [key for key in self.access.keys if hmac.compare_digest(value, key.encode())]
        return matches[0] if matches else None

    async def _read(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive
    ) -> Receive:
        """Read the body within its bounds; return the ``receive`` that delivers it."""
        if not _has_body(headers):
            return receive
        too_large = HTTPException(413, f"the request body exceeds {self.max_body} bytes")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.max_body:
            raise too_large

        async def collect() -> bytes:
            data = bytearray()
            async for chunk in Request(scope, receive).stream():
                data += chunk
                if len(data) > self.max_body:
                    raise too_large
            return bytes(data)

        try:
            body = await asyncio.wait_for(collect(), BODY_TIMEOUT)
        except asyncio.TimeoutError:
            message = f"the request body was not complete after {BODY_TIMEOUT:g} s"
            raise HTTPException(408, message) from None
        pending: list[Message] = [{"type": "http.request", "body": body}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        return replay


@cache
def own_names() -> frozenset[str]:
    """Return the names of this machine, in lower case; the first call may ask a name server."""
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, name.partition(".")[0], socket.getfqdn().lower()})


def _is_ambiguous(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a header that the guard reads occurs several times."""
    names = [name for name, _ in headers]
    return any(names.count(name) > 1 for name in _UNIQUE_HEADERS)


def _has_body(headers: Mapping[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _is_same_site(origin: str, host: re.Match[str]) -> bool:
    """Return whether an origin is the site that the request is sent to."""
    try:
        parts = urlsplit(origin)
        default = _DEFAULT_PORTS.get(parts.scheme)
        port = parts.port or default
    except ValueError:
        return False
    name = host["name"].strip("[]").lower()
    return parts.hostname == name and port == (int(host["port"]) if host["port"] else default)
