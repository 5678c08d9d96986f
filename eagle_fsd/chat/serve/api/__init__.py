"""FastChat's OpenAI-compatible API server, adapted to current OpenAI clients.

Start with :mod:`~eagle_fsd.chat.serve.api.app`, the middleware around FastChat's application.
:mod:`~eagle_fsd.chat.serve.api.requests` translates requests,
:mod:`~eagle_fsd.chat.serve.api.upstream` calls workers, and
:mod:`~eagle_fsd.chat.serve.api.replies` completes responses.
"""
