"""Serve a pair: over OpenAI's API in one process, and as a worker of FastChat's servers.

Start with :mod:`~eagle_fsd.chat.serve.api`, the application;
:mod:`~eagle_fsd.chat.serve.openai_format` declares requests and builds responses.
:mod:`~eagle_fsd.chat.serve.worker` implements FastChat's protocol.
:mod:`~eagle_fsd.chat.serve.guard` decides which requests reach a server,
:mod:`~eagle_fsd.chat.serve.connections` runs it and decides which connections stay open.
"""
