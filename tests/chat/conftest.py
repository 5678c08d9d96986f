"""One group of servers for all tests of the session.

Modules that use the servers are marked with ``xdist_group("servers")``, so that one worker process
runs all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from processes import MAX_BATCH, MAX_WAITING, Servers


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Servers that tests leave as they find them."""
    servers = Servers("--queue", str(MAX_WAITING), "--max-batch", str(MAX_BATCH))
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def client(servers: Servers) -> openai.OpenAI:
    """An OpenAI client of the servers."""
    return servers.client()
