"""One server in this process for all tests of the session."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from api_servers import MAX_BATCH, MAX_WAITING, APIThread

from eagle_fsd import EagleFSD


@pytest.fixture(scope="session")
def server(model: EagleFSD) -> Iterator[APIThread]:
    """A server that tests leave as they find it."""
    server = APIThread(model, queue=MAX_WAITING, max_batch=MAX_BATCH)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client(server: APIThread) -> openai.OpenAI:
    """An OpenAI client of the server."""
    return server.client()
