"""HTML of the web page (eagle_fsd.chat.web.rendering)."""

from __future__ import annotations

from html.parser import HTMLParser

from eagle_fsd import AcceptanceConfig
from eagle_fsd.chat.backend import Token
from eagle_fsd.chat.web import rendering

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"
ACCEPTANCE = AcceptanceConfig(threshold=0.2)
TOKENS = [
    Token(1, "At", "exact", 0.01, 0.9, [("At", 0.9), ("In", 0.05)]),
    Token(2, " first", "fuzzy", 0.125, 0.3, [(" last", 0.4)]),
    Token(3, ",\n", "target", None, 1.0),
]


class Document(HTMLParser):
    """Parsed HTML: its elements with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open_tags: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def tokens(self) -> list[dict[str, str | None]]:
        """Return the attributes of the token elements."""
        return [
            attributes
            for _, attributes in self.elements
            if "fsd-token" in (attributes.get("class") or "")
        ]


def render_all(text: str) -> str:
    """Call every function that takes text with ``text``."""
    token = Token(1, text, "fuzzy", 0.1, 0.5, [(text, 0.5)])
    answer = rendering.answer_html([token, token], ACCEPTANCE, difference=1)
    return "".join(
        [
            rendering.message_html("user", rendering.question_html(text), text),
            rendering.message_html("assistant", answer, text),
            rendering.error_html(text),
            rendering.comparison_html((answer, answer), (text, text), (text, text), text),
            rendering.stats_html({}, {}, placeholder=text),
            rendering.strip_html([token], ACCEPTANCE, 0.5),
            rendering.export_html({text: [text]}),
        ]
    )


def test_text_is_escaped() -> None:
    hostile, harmless = Document(render_all(HOSTILE)), Document(render_all("harmless"))
    assert hostile.open_tags == harmless.open_tags == []
    assert [(tag, set(attributes)) for tag, attributes in hostile.elements] == [
        (tag, set(attributes)) for tag, attributes in harmless.elements
    ]
    assert hostile.text == harmless.text.replace("harmless", HOSTILE)
    assert HOSTILE in hostile.tokens()[0]["title"]


def test_tokens_carry_origin_and_description() -> None:
    """One of them is a tab stop."""
    silent = Token(9, "", "target")
    document = Document(rendering.answer_html([silent, *TOKENS], ACCEPTANCE))
    exact, fuzzy, target = document.tokens()
    assert [item["class"] for item in (exact, fuzzy, target)] == [
        "fsd-token fsd-exact",
        "fsd-token fsd-fuzzy",
        "fsd-token fsd-target",
    ]
    assert "Divergence (js): 0.1250 (T = 0.2)" in fuzzy["title"]
    assert "Target probability: 30.0%" in fuzzy["title"]
    assert "“ last” 40.0%" in fuzzy["title"]
    assert rendering.NO_DIVERGENCE in target["title"]
    assert "“,⏎”" in target["title"]
    assert document.text == "At first,\n"
    assert [item["tabindex"] for item in document.tokens()] == ["0", "-1", "-1"]
    legend = Document(rendering.legend_html()).tokens()
    assert [item["class"].split("-")[-1] for item in legend] == list(rendering.LEGEND)
    assert not [item for item in legend if "tabindex" in item]
    for busy in (True, False):
        document = Document(rendering.answer_html(TOKENS, ACCEPTANCE, busy=busy))
        assert document.elements[0][1]["aria-busy"] == str(busy).lower()
        assert ("fsd-caret" in [item.get("class") for _, item in document.elements]) == busy


def test_strip_has_a_bar_per_visible_token_and_a_text_alternative() -> None:
    silent = Token(9, "", "target", 0.4)
    document = Document(rendering.strip_html([*TOKENS, silent], ACCEPTANCE, 0.5))
    bars = [attributes for tag, attributes in document.elements if tag == "i"]
    assert [(bar["class"], bar.get("style")) for bar in bars] == [
        ("fsd-bar fsd-exact", "--d:0.01"),
        ("fsd-bar fsd-fuzzy", "--d:0.125"),
        ("fsd-bar fsd-target", None),
    ]
    # Tokens carry the same values, for the colors and for the browser's script.
    answer = Document(rendering.answer_html(TOKENS, ACCEPTANCE))
    assert [item.get("style") for item in answer.tokens()] == [bar.get("style") for bar in bars]
    empty = Document(rendering.strip_html([TOKENS[2]], ACCEPTANCE, 0.5))
    elements = [item for _, item in document.elements + empty.elements]
    labels = [item["aria-label"] for item in elements if item.get("role") == "img"]
    assert labels == [
        "3 tokens, 2 with a divergence: median 0.0675, largest 0.1250 at “ first”; 2 below T = 0.2",
        "1 tokens, 0 with a divergence",
    ]
    assert "0.00005 to 0.5" in document.text
    # A value just below T must not be rounded to T.
    edge = AcceptanceConfig(threshold=0.05)
    html = rendering.strip_html([Token(1, "x", "fuzzy", 0.04999999)], edge, 0.5)
    assert "--d:0.04999999" in html
    assert 'data-threshold="0.05"' in html


def test_first_difference_returns_the_index() -> None:
    for left, right, streaming, complete in (
        ([1, 2, 3], [1, 2, 3], None, None),
        ([1, 2, 3], [1, 5, 3], 1, 1),
        ([1, 2], [1, 2, 3], None, 2),
        ([1, 2, 3], [1], None, 1),
        ([], [], None, None),
        ([], [4], None, 0),
    ):
        one, other = ([Token(id_, f" {id_}", "exact") for id_ in ids] for ids in (left, right))
        assert rendering.first_difference(one, other, complete=False) == streaming
        assert rendering.first_difference(one, other, complete=True) == complete


def test_first_difference_is_marked_in_both_answers_and_described() -> None:
    end = Token(0, "", "target")
    longer, shorter = [*TOKENS, Token(4, " so", "exact"), end], [*TOKENS, end]
    for tokens, text in ((longer, " so"), (shorter, "∎")):
        document = Document(rendering.answer_html(tokens, ACCEPTANCE, difference=3))
        assert [tag for tag, _ in document.elements].count("mark") == 1
        assert [item for item in document.tokens() if "fsd-differs" in item["class"]]
        assert document.text.endswith(text)
    # An answer that reached the token limit has no end token to mark.
    truncated = Document(rendering.answer_html(TOKENS, ACCEPTANCE, difference=3))
    assert [tag for tag, _ in truncated.elements].count("mark") == 1

    describe = rendering.describe_difference
    assert describe(longer, shorter, complete=True, sampled=False) == (
        "First difference at token 4: exact “ so”, FSD “<end>”."
    )
    assert "FSD no further token" in describe(longer, TOKENS, complete=True, sampled=False)
    assert "sampling" in describe(longer, shorter, complete=True, sampled=True)
    assert describe(TOKENS, TOKENS, complete=True, sampled=False) == (
        "The answers are identical (3 tokens)."
    )
    assert describe(longer, TOKENS, complete=False, sampled=False) == "No difference so far."


def test_stats_show_the_speedup_once_both_speeds_are_known() -> None:
    fsd = {"tokens_per_second": 90.0, "tau": 3.5, "tokens": 70, "steps": 20, "fuzzy_tokens": 7}
    ar = {"tokens_per_second": 30.0, "tau": 1.0, "tokens": 64, "steps": 64, "fuzzy_tokens": 0}
    both = Document(rendering.stats_html(fsd, ar)).text
    assert both.startswith("3.0x")
    for shown in ("90.0", "30.0", "3.50", "1.00", "10.0%"):
        assert shown in both
    alone = Document(rendering.stats_html(fsd, {})).text
    assert alone.startswith(rendering.NONE)
    assert "90.0" in alone
