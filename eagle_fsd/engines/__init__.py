"""This project's acceptance rules in other engines.

:mod:`~eagle_fsd.engines.settings` reads the settings that an engine is given,
:mod:`~eagle_fsd.engines.chains` applies the library's rules to the chains that vLLM drafts, and
``sglang.trees`` to the trees of SGLang. Each engine has a folder, whose modules alone import it.
:mod:`~eagle_fsd.engines.hugging_face` writes repositories for ``generate`` of transformers.
"""
