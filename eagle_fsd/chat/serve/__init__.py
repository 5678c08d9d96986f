"""FastChat's servers around a pair: controller, worker and OpenAI-compatible API.

Start with :mod:`~eagle_fsd.chat.serve.servers`, which runs each of them, and
:mod:`~eagle_fsd.chat.serve.worker`, which decodes. :mod:`~eagle_fsd.chat.serve.cluster` runs
several of them as child processes; :mod:`~eagle_fsd.chat.serve.api` adapts FastChat's API server.
"""
