"""Helpers for all other packages, none of which they import.

``options.py`` is the base class of all option models, ``files.py`` writes files atomically,
``provenance.py`` describes the machine and versions behind a result, ``chat_templates.py`` renders
chats, ``detokenization.py`` decodes tokens incrementally, ``text.py`` and ``terminal.py`` format
strings for messages and terminals, ``progress.py`` declares progress callbacks, ``signals.py``
handles SIGINT and SIGTERM, ``processes.py`` joins the processes of a launcher, ``host_memory.py``
measures main memory, ``errors.py`` recognizes exhausted memory, and ``chat_api.py`` is a client of
OpenAI-compatible servers.
"""
