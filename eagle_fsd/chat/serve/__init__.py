"""FastChat's servers around a pair: controller, worker and OpenAI-compatible API.

Start with :mod:`~eagle_fsd.chat.serve.servers`, which runs each of them, and
:mod:`~eagle_fsd.chat.serve.worker`, which decodes. :mod:`~eagle_fsd.chat.serve.guard` decides which
requests reach a server, :mod:`~eagle_fsd.chat.serve.connections` which connections stay open.
:mod:`~eagle_fsd.chat.serve.cluster` runs several servers as child processes;
:mod:`~eagle_fsd.chat.serve.api` adapts FastChat's API server.
"""

import os

# Seconds, which FastChat reads when it is imported. Its own defaults are 45 and 90.
os.environ.setdefault("FASTCHAT_WORKER_HEART_BEAT_INTERVAL", "5")
os.environ.setdefault("FASTCHAT_CONTROLLER_HEART_BEAT_EXPIRATION", "15")
