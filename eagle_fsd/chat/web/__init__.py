"""The web page: a chat whose tokens are colored by origin, with sliders and a comparison.

Start reading with ``page``, the behavior of the page without any framework. ``rendering`` makes its
HTML, ``app`` lays it out with Gradio and serves it, ``guard`` restricts Gradio's server to what the
page needs, and ``script.js`` and ``style.css`` are the page's own. Only ``app`` imports Gradio.
"""
