"""The web page: a chat whose tokens are colored by origin, with sliders and a comparison.

``page.html``, ``page.css`` and ``page.js`` are served as they are. The page keeps its chat in the
browser and decodes through ``/v1/chat/completions``, like any other client. ``page`` serves the
files, and the settings of the controls.
"""
