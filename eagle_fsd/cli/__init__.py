"""The command line, ``eagle-fsd``: modules that parse options, call the library and print results.

Start with ``parsing`` (how the fields of option models become options), ``app`` (the list of
commands, and exit statuses) and ``generate`` (a typical command). Parsing imports neither torch nor
transformers: a command imports what it needs when it runs.
"""

from __future__ import annotations

from eagle_fsd.cli.app import main

__all__ = ["main"]
