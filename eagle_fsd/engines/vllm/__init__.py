"""A vLLM plugin that accepts drafted tokens by this project's rules.

vLLM calls :func:`register` in each of its processes. If the configuration of vLLM holds settings,
their rule is applied in the rejection sampler of Model Runner V1
(:mod:`~eagle_fsd.engines.vllm.sampler`) or V2 (:mod:`~eagle_fsd.engines.vllm.sampler_v2`).
Otherwise nothing changes.
"""

from __future__ import annotations


def register() -> None:
    """Entry point in the group ``vllm.general_plugins``."""
    from eagle_fsd.engines.vllm.patches import install

    install()
