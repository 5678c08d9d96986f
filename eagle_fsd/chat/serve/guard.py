"""The ASGI guard in front of every server: controller, worker, API and page.

A web page in the user's browser can send requests to servers on the same machine. The guard
therefore rejects requests whose ``Host`` is not a name of the server (DNS rebinding), whose
``Origin`` is another site, and bodies that are not declared as JSON, which browsers send to other
sites without asking them. It also checks keys before it reads a body, bounds bodies in size and
time, and answers exceptions without a traceback.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from eagle_fsd.chat.request_body import BodyTimeoutError, BodyTooLargeError, read_body
from eagle_fsd.chat.serve.asgi import App, Message, Receive, Send, replay_body

log = logging.getLogger(__name__)

#: Environment variable with the secret that the servers of a cluster share. It is not an option
#: because other users can read a process's arguments.
CLUSTER_KEY_VARIABLE = "EAGLE_FSD_CLUSTER_KEY"
#: Environment variable with the API keys that clients may use, separated by commas.
API_KEYS_VARIABLE = "EAGLE_FSD_API_KEYS"
#: Minimum length of the cluster's key.
MIN_KEY_LENGTH = 16
#: Requests that need no key: they only tell whether a server is running.
OPEN_ROUTES = ("/health", "/test_connection")

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(:(?P<port>\d{1,5}))?", re.I)
_DEFAULT_PORTS = {"http": 80, "https": 443}


def cluster_key() -> str | None:
    """Return the cluster's key from the environment, or None.

    Raises:
        ValueError: The key is too short or cannot be sent in a header.
    """
    key = os.environ.get(CLUSTER_KEY_VARIABLE, "").strip()
    if key and (len(key) < MIN_KEY_LENGTH or not re.fullmatch(r"[!-~]+", key)):
        raise ValueError(
            f"{CLUSTER_KEY_VARIABLE} must consist of at least {MIN_KEY_LENGTH} ASCII characters"
            " without spaces"
        )
    return key or None


def cluster_headers() -> dict[str, str]:
    """Return the headers of requests to the controller and to workers."""
    key = cluster_key()
    return {"Authorization": f"Bearer {key}"} if key else {}


def api_keys() -> tuple[str, ...]:
    """Return the API keys from the environment."""
    keys = os.environ.get(API_KEYS_VARIABLE, "").split(",")
    return tuple(key.strip() for key in keys if key.strip())


@dataclass(frozen=True)
class Access:
    """Who may use a server.

    Attributes:
        hosts: Names of the server, beside those of this machine, that requests may contain in
            their ``Host`` header.
        keys: Keys, one of which every request must send; empty: no key is required.
        scheme: How the key is sent: ``Bearer``, or ``Basic`` as the password of any user, for
            which browsers ask the visitor.
    """

    hosts: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    scheme: Literal["Bearer", "Basic"] = "Bearer"

    @classmethod
    def for_cluster(cls, hosts: tuple[str, ...] = ()) -> Access:
        """Return the access to a controller or a worker, which requires the cluster's key if set.

        Args:
            hosts: Further names of the server.
        """
        key = cluster_key()
        return cls(hosts, (key,) if key else ())


#: Requires no key, and trusts this machine's names.
ANYONE = Access()


class RefusedError(Exception):
    """The request is refused.

    Args:
        status: HTTP status of the response.
        message: The error message.

    Attributes:
        status: HTTP status of the response.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _detail(message: str, status: int) -> dict[str, Any]:
    return {"detail": message}


class Guard:
    """ASGI middleware in front of a server.

    Args:
        app: The server's application.
        access: Who may use the server.
        max_body: Maximum size of a request body in bytes.
        routes: Regular expressions of the allowed paths by method; None: all.
        error_body: Builds the body of an error response from its message and HTTP status.
    """

    def __init__(
        self,
        app: App,
        access: Access = ANYONE,
        max_body: int = 1 << 20,
        routes: Mapping[str, re.Pattern[str]] | None = None,
        error_body: Callable[[str, int], dict[str, Any]] = _detail,
    ) -> None:
        self.app, self.access, self.max_body = app, access, max_body
        self.routes, self.error_body = routes, error_body

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle a connection; see the ASGI specification for the arguments."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return  # not accepting a WebSocket closes it
        started = False

        async def tracked_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check(scope)
            receive = await self._read(scope, receive)
            await self.app(scope, receive, tracked_send)
        except RefusedError as error:
            headers = {}
            if error.status == 401:
                challenge = f'{self.access.scheme} realm="eagle-fsd", charset="UTF-8"'
                headers = {"WWW-Authenticate": challenge}
            body = self.error_body(str(error), error.status)
            await JSONResponse(body, error.status, headers)(scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                body = self.error_body("the request failed", 500)
                await JSONResponse(body, 500)(scope, receive, send)

    def _check(self, scope: Message) -> None:
        """Raise RefusedError unless the request's head is acceptable."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        match = _HOST.fullmatch(host)
        if match is None or not self._is_own_name(match["name"], scope.get("server")):
            message = f"the Host header must name this server; got {host!r}: see --trusted-hosts"
            raise RefusedError(421, message)
        origin = headers.get(b"origin")
        if origin is not None and not _is_same_site(origin.decode("latin-1"), match):
            raise RefusedError(403, "requests from other sites' web pages are not allowed")
        method, path = scope["method"], scope["path"]
        if self.access.keys and path not in OPEN_ROUTES and not self._has_key(headers):
            raise RefusedError(401, "a valid key is required")
        if self.routes is not None:
            pattern = self.routes.get(method)
            if pattern is None or pattern.fullmatch(path) is None:
                raise RefusedError(404, "Not Found")
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if _has_body(headers) and kind != b"application/json":
            raise RefusedError(415, "the Content-Type must be application/json")

    def _is_own_name(self, name: str, server: tuple[str, int | None] | None) -> bool:
        name = name.strip("[]").rstrip(".").lower()
        if name in own_names() or name in (item.lower() for item in self.access.hosts):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or (server is not None and str(address) == server[0])

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the request has a key, in a time that does not depend on its value."""
        scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != self.access.scheme.lower().encode():
            return False
        value = value.strip()
        if self.access.scheme == "Basic":
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        matches = [hmac.compare_digest(value, key.encode()) for key in self.access.keys]
        return any(matches)

    async def _read(self, scope: Message, receive: Receive) -> Receive:
        """Read the body within its bounds; return the ``receive`` that delivers it."""
        headers = dict(scope["headers"])
        if not _has_body(headers):
            return receive
        length = headers.get(b"content-length", b"").decode("latin-1")
        try:
            body = await read_body(Request(scope, receive).stream(), length, self.max_body)
        except BodyTooLargeError as error:
            raise RefusedError(413, str(error)) from error
        except BodyTimeoutError as error:
            raise RefusedError(408, str(error)) from error
        self.check_body(scope["path"], body)
        return replay_body(body, receive)

    def check_body(self, path: str, body: bytes) -> None:
        """Validate a body before the application sees it.

        Args:
            path: The request's path.
            body: The body.

        Raises:
            RefusedError: The body is invalid.
        """


@cache
def own_names() -> frozenset[str]:
    """Return the names of this machine, in lower case; the first call may ask a name server."""
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, name.partition(".")[0], socket.getfqdn().lower()})


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
