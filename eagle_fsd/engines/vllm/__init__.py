"""A vLLM plugin that accepts drafted tokens by this project's rules.

vLLM calls :func:`register` in each of its processes. Without settings nothing changes; with them,
the rule is applied in the rejection sampler of the first (:mod:`~eagle_fsd.engines.vllm.sampler`)
or second model runner (:mod:`~eagle_fsd.engines.vllm.sampler_v2`).
"""

from __future__ import annotations


def register() -> None:
    """Entry point in the group ``vllm.general_plugins``."""
    from eagle_fsd.engines.vllm.patches import install

    install()
