"""Markup of the web page: what goes in as text stays text."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from eagle_fsd import FSDSettings
from eagle_fsd.chat.backend import Token
from eagle_fsd.chat.web import rendering as text

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"
SETTINGS = FSDSettings(threshold=0.2)
TOKENS = [
    Token(1, "At", "exact", 0.01, 0.9, [("At", 0.9), ("In", 0.05)]),
    Token(2, " first", "fuzzy", 0.125, 0.3, [(" last", 0.4)]),
    Token(3, ",\n", "target", None, 1.0),
]


class Elements(HTMLParser):
    """What a browser would find: elements with their attributes, and the text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def tokens(self) -> list[dict[str, str | None]]:
        return [
            attributes
            for _, attributes in self.found
            if "fsd-token" in (attributes.get("class") or "")
        ]


def everything(said: str) -> str:
    """Every function of the module, given ``said`` wherever it takes a text."""
    token = Token(1, said, "fuzzy", 0.1, 0.5, [(said, 0.5)])
    answer = text.answer_html([token, token], SETTINGS, parting=1)
    return "".join(
        [
            text.turn_html("user", text.said_html(said), said),
            text.turn_html("assistant", answer, said),
            text.notice_html(said),
            text.compare_html(answer, answer, (said, said), (said, said), said),
            text.figures_html({}, {}, waiting=said),
        ]
    )


def test_whatever_is_said_is_text() -> None:
    nasty, tame = Elements(everything(NASTY)), Elements(everything("tame"))
    assert nasty.open == tame.open == []
    assert [(tag, set(has)) for tag, has in nasty.found] == [
        (tag, set(has)) for tag, has in tame.found
    ]
    assert nasty.text == tame.text.replace("tame", NASTY)
    assert NASTY in nasty.tokens()[0]["title"]


def test_tokens_carry_their_origin_and_what_is_known_of_them() -> None:
    found = Elements(text.answer_html(TOKENS, SETTINGS))
    exact, fuzzy, target = found.tokens()
    assert [item["class"] for item in (exact, fuzzy, target)] == [
        "fsd-token fsd-exact",
        "fsd-token fsd-fuzzy",
        "fsd-token fsd-target",
    ]
    assert "js divergence 0.1250 (T = 0.2)" in fuzzy["title"]
    assert "target's probability 30.0%" in fuzzy["title"]
    assert "“ last” 40.0%" in fuzzy["title"]
    assert text.NO_DIVERGENCE in target["title"]
    assert "“,⏎”" in target["title"]
    assert found.text == "At first,\n"


def test_the_keyboard_enters_an_answer_once() -> None:
    silent = Token(9, "", "target")
    found = Elements(text.answer_html([silent, *TOKENS], SETTINGS)).tokens()
    assert [item["tabindex"] for item in found] == ["0", "-1", "-1"]


def test_an_answer_on_its_way_says_so() -> None:
    busy = Elements(text.answer_html(TOKENS, SETTINGS, busy=True))
    done = Elements(text.answer_html(TOKENS, SETTINGS))
    assert busy.found[0][1]["aria-busy"] == "true"
    assert done.found[0][1]["aria-busy"] == "false"
    assert any(has.get("class") == "fsd-caret" for _, has in busy.found)


@pytest.mark.parametrize(
    ("left", "right", "soon", "at_end"),
    [
        ([1, 2, 3], [1, 2, 3], None, None),
        ([1, 2, 3], [1, 5, 3], 1, 1),
        ([1, 2], [1, 2, 3], None, 2),
        ([1, 2, 3], [1], None, 1),
        ([], [], None, None),
        ([], [4], None, 0),
    ],
)
def test_where_answers_part(
    left: list[int], right: list[int], soon: int | None, at_end: int | None
) -> None:
    one, other = ([Token(item, f" {item}", "exact") for item in side] for side in (left, right))
    assert text.parting(one, other) == soon
    assert text.parting_at_end(one, other) == at_end


def test_the_parting_is_marked_on_both_sides_and_told() -> None:
    end = Token(0, "", "target")
    longer, shorter = [*TOKENS, Token(4, " so", "exact"), end], [*TOKENS, end]
    for side, shown in ((longer, " so"), (shorter, "∎")):
        found = Elements(text.answer_html(side, SETTINGS, parting=3))
        marks = [has for tag, has in found.found if tag == "mark"]
        assert len(marks) == 1
        assert [has["class"] for has in found.tokens() if "fsd-parts" in has["class"]]
        assert found.text.endswith(shown)
    told = text.verdict(longer, shorter, done=True, sampled=False)
    assert told == "They part at token 4: exact says “ so”, FSD “end”."
    assert "nothing more" in text.verdict(longer, TOKENS, done=True, sampled=False)
    assert "by chance" in text.verdict(longer, shorter, done=True, sampled=True)
    assert text.verdict(TOKENS, TOKENS, done=True, sampled=False) == "The same 3 tokens."
    assert text.verdict(longer, TOKENS, done=False, sampled=False) == "No difference so far."
    # One whose tokens are at their end without an end token: cut off at the most tokens.
    cut = Elements(text.answer_html(TOKENS, SETTINGS, parting=3))
    assert [tag for tag, _ in cut.found].count("mark") == 1


def test_figures_stand_beside_plain_decodings() -> None:
    fsd = {"tokens_per_second": 90.0, "tau": 3.5, "tokens": 70, "steps": 20, "fuzzy_tokens": 7}
    plain = {"tokens_per_second": 30.0, "tau": 1.0, "tokens": 64, "steps": 64, "fuzzy_tokens": 0}
    both = Elements(text.figures_html(fsd, plain)).text
    assert both.startswith("3.0 x")
    for shown in ("90.0", "30.0", "3.50", "1.00", "10.0%"):
        assert shown in both
    alone = Elements(text.figures_html(fsd, {})).text
    assert " x" not in alone
    assert "90.0" in alone


def test_the_legend_names_every_origin() -> None:
    found = Elements(text.legend_html())
    assert [item["class"].split("-")[-1] for item in found.tokens()] == list(text.LEGEND)
    assert not [item for item in found.tokens() if "tabindex" in item]
