"""This project's acceptance rules in other engines.

:mod:`~eagle_fsd.engines.settings` reads the settings that an engine is given, and
:mod:`~eagle_fsd.engines.chains` applies the library's rules to the chains that engines draft. Each
engine has a folder, the only place that imports it.
"""
