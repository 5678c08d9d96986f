"""Chat with a pair: in the terminal, in a web page, and over the OpenAI API.

Start with :mod:`~eagle_fsd.chat.session`, which generates one answer as a stream of text.
:mod:`~eagle_fsd.chat.terminal` is the terminal chat. Behind the servers,
:mod:`~eagle_fsd.chat.request_body` and :mod:`~eagle_fsd.chat.requests` read and validate requests,
and :mod:`~eagle_fsd.chat.decode_queue` decodes them in one batch. :mod:`~eagle_fsd.chat.serve`
contains the API server and the FastChat worker, and :mod:`~eagle_fsd.chat.web` the web page, which
uses the API. Both servers get their answers from :mod:`~eagle_fsd.chat.backend`.
"""
