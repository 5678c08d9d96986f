"""The OpenAI-compatible API server.

Start with :mod:`~eagle_fsd.chat.serve.api.app`, the routes.
:mod:`~eagle_fsd.chat.serve.api.schemas` declares requests,
:mod:`~eagle_fsd.chat.serve.api.workers` sends them to workers,
:mod:`~eagle_fsd.chat.serve.api.responses` builds responses from the workers' outputs, and
:mod:`~eagle_fsd.chat.serve.api.errors` builds error responses.
"""
