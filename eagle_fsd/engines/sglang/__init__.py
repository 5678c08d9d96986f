"""An SGLang plugin that accepts drafted tokens by this project's rules.

SGLang calls :func:`register` in each of its processes. Without settings nothing changes; with them,
the rule is applied to the target's logits before SGLang verifies a tree
(:mod:`~eagle_fsd.engines.sglang.hooks`).
"""

from __future__ import annotations


def register() -> None:
    """Entry point in the group ``sglang.srt.plugins``; ends the process if settings are refused.

    SGLang only logs other exceptions of a plugin, and would decode without the rule.
    """
    try:
        from eagle_fsd.engines.settings import find_settings

        if (settings := find_settings(None)) is not None:
            from eagle_fsd.engines.sglang.hooks import install

            install(settings)
    except ImportError as error:
        raise SystemExit(f"eagle_fsd does not support this version of SGLang: {error}") from None
    except ValueError as error:
        raise SystemExit(str(error)) from None
