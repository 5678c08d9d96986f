"""Generate the word problems and small talk that the bundled pair is trained on.

The generator is part of this package, not of training, because training, evaluation and the tests
all use it.

A problem is a chain of two to five arithmetic steps on one quantity. All sentences of the question
and of the worked answer are drawn from a small grammar, so that the same step is phrased in many
ways: the wording of an answer is free, its numbers are not. This makes the problems a fair test of
fuzzy verification, which should relax the wording and preserve the numbers.

Templates: ``[a|b|c]`` selects one alternative (brackets may be nested), then ``{field}`` is filled.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import add, floordiv, mul, sub
from typing import Literal

Split = Literal["train", "test"]
Message = dict[str, str]

#: About one question in this many belongs to the test split.
TEST_INTERVAL = 10
#: The largest result. Intermediate results can exceed it slightly.
MAX_RESULT = 200
#: Bounds of the number of equations in an answer.
MIN_STEPS, MAX_STEPS = 2, 5

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Problem:
    """One word problem. The last line of its worked answer is ``#### final``."""

    question: str
    answer: str
    final: int
    steps: int


#: Values of template fields, by name.
_Fields = dict[str, str]


def _people(names: str, he: str) -> list[_Fields]:
    return [{"name": name, "he": he} for name in names.split()]


PEOPLE = _people(
    "Mia Anna Clara Elena Fatima Grace Hana Ines Julia Kira Lena Maya Nora Olga Priya Rosa Sara "
    "Tara Uma Vera Wendy Yara Zoe Amina Bella Carmen Diana Emma Freya Gina",
    "she",
) + _people(
    "Tom Adam Ben Carlos David Emil Felix George Hugo Ivan Jonas Karim Leo Marco Noah Omar Pedro "
    "Ravi Sam Tariq Victor Will Yusuf Zane Amir Boris Chen Diego Erik Finn",
    "he",
)

#: Kinds of objects: their plural, their container and its plural, and what people do with them.
THINGS: list[_Fields] = [
    dict(zip(("things", "box", "boxes", "buys"), row.split(", "), strict=True))
    for row in """pencils, box, boxes, buys
apples, basket, baskets, picks
marbles, bag, bags, buys
stickers, sheet, sheets, buys
cookies, tray, trays, bakes
books, shelf, shelves, sorts
eggs, carton, cartons, collects
flowers, bunch, bunches, picks
shells, bucket, buckets, gathers
cards, pack, packs, buys
candles, case, cases, makes
oranges, crate, crates, picks
buttons, jar, jars, sorts
stamps, page, pages, collects
muffins, tin, tins, bakes
beads, string, strings, makes
coins, roll, rolls, collects
plums, bowl, bowls, picks
toys, chest, chests, packs
tomatoes, crate, crates, gathers
badges, card, cards, makes
balloons, packet, packets, buys
bottles, crate, crates, packs
photos, album, albums, sorts
carrots, bundle, bundles, gathers
nuts, sack, sacks, gathers
tickets, roll, rolls, buys
cups, stack, stacks, washes
lemons, net, nets, buys
ribbons, drawer, drawers, sorts""".splitlines()
]

SETTINGS = """at the market|at school|on the farm|at the fair|in the garden|at home|at the beach
at the library|in the kitchen|at the park|at the museum|in the workshop|at the shop|at camp
on a trip|at the station|in the village|at a party|at the club|at the bakery""".replace(
    "\n", "|"
).split("|")


class _Story:
    """A problem under construction: its sentences, its quantity, and the values of template fields.

    ``people`` are the person that the story is about, and a friend; by default, they are drawn.
    """

    def __init__(self, rng: random.Random, people: Sequence[_Fields] | None = None) -> None:
        self.rng = rng
        drawn = rng.sample(PEOPLE, 2)
        who, friend = people or drawn
        thing = rng.choice(THINGS)
        self.fields: dict[str, object] = {
            **who,
            **thing,
            "friend": friend["name"],
            "setting": rng.choice(SETTINGS),
            "unit": thing["things"],
        }
        self.quantity = 0
        self.question: list[str] = []
        self.answer: list[str] = []

    def draw(self, name: str, low: int, high: int) -> int:
        """Draw an integer in ``[low, high]``, which is a field of later templates."""
        number = self.rng.randint(low, high)
        self.fields[name] = number
        return number

    def say(self, template: str) -> str:
        """Expand a template."""
        while match := _CHOICE.search(template):
            choice = self.rng.choice(match.group(1).split("|"))
            template = template[: match.start()] + choice + template[match.end() :]
        return " ".join(template.format(**self.fields).split())

    def tell(self, template: str) -> None:
        """Add a sentence to the question."""
        sentence = self.say(template)
        self.question.append(sentence[0].upper() + sentence[1:])

    def work(self, reason: str, left: int, sign: str, right: int) -> int:
        """Add an equation with its reason, a template, to the answer; return the result."""
        result = _OPERATIONS[sign](left, right)
        reason = self.say(reason)
        opener = _FIRST if not self.answer else _NEXT
        link = "[, so we have|, which makes|, and that gives|, so it becomes|:|, giving]"
        equation = f"{left} {sign} {right} = {result}"
        self.answer.append(self.say(f"{opener} {reason}{link} {equation}[ {{unit}}|]."))
        return result


_OPERATIONS = {"+": add, "-": sub, "*": mul, "/": floordiv}
_FIRST = "[First,|To begin,|At first,|Let us see:|Step one:|We know that]"
_NEXT = "[Then|Next,|After that,|Now|From there,|In the next step,]"
_THEN = "[Then|Next,|After that,|Later|Soon after,|A little later,|The next day]"


# Opening steps set the quantity.
def _start_plain(story: _Story) -> None:
    story.quantity = story.draw("n", 5, 60)
    story.tell(
        "[{name} has {n} {things} {setting}|{setting}, {name} has {n} {things}|"
        "{name} starts with {n} {things} {setting}|there are {n} {things} that {name} keeps"
        " {setting}]."
    )


def _start_boxes(story: _Story) -> None:
    a, b = story.draw("a", 2, 12), story.draw("b", 2, 12)
    story.tell(
        "[{name} {buys} {a} {boxes} of {things} {setting}, with {b} {things} in each {box}|"
        "{setting}, {name} {buys} {a} {boxes} with {b} {things} in every {box}|"
        "{name} {buys} {things} {setting}: {a} {boxes} of {b} {things} each]."
    )
    reason = "[{name} has|there are|we count|{he} has] {a} {boxes} [of|with] {b} [{things}|each]"
    story.quantity = story.work(reason, a, "*", b)


def _start_two_amounts(story: _Story) -> None:
    a, b = story.draw("a", 4, 60), story.draw("b", 4, 60)
    story.tell(
        "[{setting}, {name} {buys} {a} {things} on [Monday|Friday] and {b} {things} on"
        " [Tuesday|Sunday]|{name} {buys} {a} {things} in the morning and {b} {things} in the"
        " [afternoon|evening] {setting}]."
    )
    reason = "[we add|{name} {buys}|we count|there are] [both {a} and {b}|{a} and {b}]"
    story.quantity = story.work(reason, a, "+", b)


# Middle steps change the quantity, unless its value does not permit them.
def _gain(story: _Story) -> None:
    k = story.draw("k", 2, min(60, max(2, MAX_RESULT - story.quantity)))
    story.tell(
        f"{_THEN} [{{name}}|{{he}}] [gets {{k}} more|finds {{k}} more|receives {{k}} more|"
        "is given {k} more] {things}[ from {friend}|]."
    )
    reason = "[{name}|{he}] [gets|finds|receives|adds] {k} [more|extra|new] [{things}|]"
    story.quantity = story.work(reason, story.quantity, "+", k)


def _lose(story: _Story) -> None:
    if story.quantity < 6:
        return
    k = story.draw("k", 2, min(60, story.quantity - 2))
    story.tell(
        f"{_THEN} [{{name}}|{{he}}] [gives {{k}} {{things}} to {{friend}}|loses {{k}} {{things}}|"
        "gives away {k} {things}|hands {k} {things} to {friend}|uses {k} {things}]."
    )
    reason = "[{name}|{he}] [gives away|loses|hands over|parts with] {k} [{things}|of them|]"
    story.quantity = story.work(reason, story.quantity, "-", k)


_TIMES = {2: "twice", 3: "three times", 4: "four times"}


def _multiply(story: _Story) -> None:
    fits = [k for k in _TIMES if story.quantity * k <= MAX_RESULT]
    if not fits:
        return
    k = story.rng.choice(fits)
    story.tell(
        f"{_THEN} [{{name}}|{{he}}] [works hard and has|is lucky and ends up with|trades until"
        f" {{he}} has] {_TIMES[k]} as many {{things}}."
    )
    reason = f"[{{name}}|{{he}}] [now has|reaches|gets to|counts] {_TIMES[k]} as many [{{things}}|]"
    story.quantity = story.work(reason, story.quantity, "*", k)


def _share(story: _Story) -> None:
    fits = [k for k in range(2, 10) if story.quantity % k == 0 and story.quantity // k >= 2]
    if not fits:
        return
    story.fields["k"] = k = story.rng.choice(fits)
    story.tell(
        f"{_THEN} [{{name}}|{{he}}] [splits the {{things}} equally into {{k}} {{boxes}} and keeps"
        " one {box}|shares the {things} equally among {k} friends and counts one share|"
        "divides the {things} into {k} equal piles and keeps one pile]."
    )
    reason = "[{name}|{he}] [splits|shares|divides] [them|the {things}|everything] [by|in|into] {k}"
    story.quantity = story.work(reason, story.quantity, "/", k)


def _gain_boxes(story: _Story) -> None:
    a, b = story.draw("a", 2, 9), story.draw("b", 2, 9)
    if story.quantity + a * b > MAX_RESULT:
        return
    story.tell(
        f"{_THEN} [{{name}}|{{he}}] [{{buys}}|gets] {{a}} more {{boxes}} [of|with] {{b}} {{things}}"
        " each."
    )
    reason = "[the|all the] [new|extra|other] {boxes} hold [{a} times {b}|{a} by {b}]"
    more = story.work(reason, a, "*", b)
    reason = "[we|{name} can|we can] [add|include|count] [them|these|the new ones] [too|as well|]"
    story.quantity = story.work(reason, story.quantity, "+", more)


# Closing steps turn the quantity into the result and ask for it. A step that does not fit adds no
# sentence to the question.
def _close_count(story: _Story) -> None:
    story.tell(
        "[How many {things} does {name} have [now|in the end|at the end]|"
        "How many {things} [are there|are left] in the end|"
        "What is the number of {things} that {name} has [now|in the end]]?"
    )


def _close_sell(story: _Story) -> None:
    fits = [p for p in range(2, 10) if story.quantity * p <= MAX_RESULT]
    if not fits:
        return
    story.fields["p"] = price = story.rng.choice(fits)
    story.tell(
        "[{name} sells all the {things} for {p} dollars each|"
        "Each of the {things} is then sold for {p} dollars]."
    )
    story.tell(
        "[How many dollars does {name} get|How much money does {name} make|"
        "How many dollars is that [in all|in total]]?"
    )
    story.fields["unit"] = "dollars"
    reason = "[{name}|{he}] [sells|trades] [them|each one|everything] [at|for] {p} dollars"
    story.quantity = story.work(reason, story.quantity, "*", price)


def _close_together(story: _Story) -> None:
    k = story.draw("k", 2, 30)
    more = story.rng.random() < 0.5 or story.quantity <= k + 1
    other = story.quantity + k if more else story.quantity - k
    if story.quantity + other > MAX_RESULT:
        return
    word = "more" if more else "fewer"
    story.tell(
        f"[{{friend}} has|At that time {{friend}} has] {{k}} {word} {{things}} than {{name}}."
    )
    story.tell(
        "[How many {things} do they have together|How many {things} do {name} and {friend} have"
        " [in all|in total|together]]?"
    )
    reason = f"{{friend}} [has|owns|holds] {{k}} {word}[ than {{name}}|]"
    other = story.work(reason, story.quantity, "+" if more else "-", k)
    reason = (
        "[we|we can|now we] [add|join|put together] [both|the two|their] [parts|numbers|amounts]"
    )
    story.quantity = story.work(reason, story.quantity, "+", other)


_Step = Callable[[_Story], None]
_STARTS: list[_Step] = [_start_plain, _start_boxes, _start_boxes, _start_two_amounts]
_MIDDLES: list[_Step] = [_gain, _gain, _lose, _lose, _lose, _multiply, _share, _share, _gain_boxes]
_CLOSES: list[_Step] = [_close_count, _close_count, _close_count, _close_sell, _close_together]
_CLOSE_EQUATIONS: dict[_Step, int] = {_close_count: 0, _close_sell: 1, _close_together: 2}
_CONCLUSION = (
    "[So|Therefore,|Thus,|In the end,|All told,]"
    " [the answer is|the result is|we get|the final number is] {n}[ {unit}|]."
)


def generate_problem(rng: random.Random, people: Sequence[_Fields] | None = None) -> Problem:
    """Generate one problem of either split.

    ``people`` are the person that the story is about, and a friend; by default, they are drawn. The
    rest of the problem does not depend on them.
    """
    while True:
        story = _Story(rng, people)
        wanted = rng.randint(MIN_STEPS, MAX_STEPS)
        rng.choice(_STARTS)(story)
        close = rng.choice(_CLOSES)
        reserved = _CLOSE_EQUATIONS[close]
        for _ in range(20):
            steps = len(story.answer)  # a sentence for each equation
            if steps >= wanted - reserved:
                break
            step = rng.choice(_MIDDLES)
            if step is not _gain_boxes or steps + 2 <= wanted - reserved:
                step(story)
        before = len(story.question)
        close(story)
        steps = len(story.answer)
        if steps != wanted or len(story.question) == before or story.quantity > MAX_RESULT:
            continue
        story.fields["n"] = story.quantity
        conclusion = story.say(_CONCLUSION)
        answer = " ".join([*story.answer, conclusion]) + f"\n#### {story.quantity}"
        return Problem(" ".join(story.question), answer, story.quantity, steps)


def split_of(question: str) -> Split:
    """Return the split of a question.

    A hash of the text determines the split, so the two splits cannot overlap.
    """
    digest = hashlib.sha256(question.encode()).digest()
    return "test" if digest[0] % TEST_INTERVAL == 0 else "train"


def problems(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """Generate distinct problems. A larger count with the same seed extends the list."""
    rng = random.Random(f"{split}-{seed}")
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = generate_problem(rng)
        if split_of(problem.question) == split:
            found.setdefault(problem.question, problem)
    return list(found.values())


def edited_problems(
    split: Split, count: int, versions: int = 3, seed: int = 0
) -> list[list[Problem]]:
    """Generate distinct problems, each told several times about other people.

    Only names and pronouns differ between the versions, so in a chat that asks for one after the
    other, every answer but the first largely repeats an earlier one. A larger count with the same
    seed extends the list.
    """
    rng = random.Random(f"edits-{split}-{seed}")
    found: dict[str, list[Problem]] = {}
    while len(found) < count:
        state = rng.random()
        people = rng.sample(PEOPLE, len(PEOPLE))
        told = (generate_problem(random.Random(state), pair) for pair in pairwise(people))
        kept = list(islice((item for item in told if split_of(item.question) == split), versions))
        if len(kept) == versions:  # else too few of the versions belong to the split
            found.setdefault(kept[0].question, kept)
    return list(found.values())


# Small talk: templates of the user's message and of the answer.
SMALL_TALK: list[tuple[str, str]] = [
    (
        "[hello|Hello!|hi|Hi there|hey|good morning|Good evening]",
        "[Hello!|Hi!|Hello there!|Good to see you!] [I can help you|I am glad to help|I am here to"
        " help] with [word problems|math problems|a word problem]. [What would you like to"
        " solve?|Which problem do you have?|Just tell me the story.|Ask me anything with numbers.]",
    ),
    (
        "[what can you do?|What can you do|what do you know?|how can you help me?|help]",
        "[I solve|I can solve|I work on] [short|small|simple] word problems"
        " [step by step|one step at a time]. [Tell me a story with numbers|Give me a problem"
        "|Ask me about things people buy and share]"
        " and I [will find the answer|will work it out|show every step].",
    ),
    (
        "[who are you?|What are you?|what is your name?|Tell me about yourself]",
        "I am [a small|a very small|a little] language model [that solves|trained on|made for] word"
        " problems. [I was trained on a small machine|I know about numbers and little else|I am"
        " here to show fast decoding].",
    ),
    (
        "[thanks|Thank you!|thank you very much|Great, thanks]",
        "[You are welcome!|My pleasure!|Glad to help!|Any time!] [Do you have another"
        " problem?|Ask me another one.|Come back with more numbers.]",
    ),
    (
        "[bye|Goodbye|see you later|Good night]",
        "[Goodbye!|See you!|Bye!|Good night!] [Have a nice day.|Come back soon.|It was fun.]",
    ),
    (
        "[how are you?|How are you today?|how is it going?]",
        "[I am fine|I am well|All is well], [thank you|thanks for asking]."
        " [How can I help you?|What shall we solve?|Do you have a problem for me?]",
    ),
    (
        "[tell me a joke|Do you know a joke?|make me laugh]",
        "[Why was six afraid of seven? Because seven ate nine!|What do you get from a tree of"
        " numbers? Square roots!|Parallel lines have so much in common. They never meet!]",
    ),
    (
        "[what is the weather?|Who won the game?|what is the capital of France?|write a poem]",
        "[I am sorry,|Sorry,] I [only know|only understand|was trained only on] word problems."
        " [Please ask me about numbers.|Do you have a word problem?|Try a story with numbers.]",
    ),
]


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Generate an exchange of small talk: the user's message and the answer."""
    story = _Story(rng)
    user, assistant = rng.choice(SMALL_TALK)
    return story.say(user), story.say(assistant)


def chat_messages(*exchanges: tuple[str, str]) -> list[Message]:
    """Convert exchanges, pairs of a user's message and the answer, to the messages of a chat."""
    return [
        {"role": role, "content": text}
        for exchange in exchanges
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]


def chats(split: Split, seed: int = 0) -> Iterator[list[Message]]:
    """Generate an endless stream of chats: mostly one problem, some several turns or small talk."""
    rng = random.Random(f"chats-{split}-{seed}")
    while True:
        kinds = rng.choices(["p", "pp", "sp", "s", "ps", "pps", "ppp"], [70, 9, 7, 5, 4, 2, 3])[0]
        exchanges = []
        for kind in kinds:
            if kind == "s":
                exchanges.append(small_talk(rng))
                continue
            problem = generate_problem(rng)
            while split_of(problem.question) != split:
                problem = generate_problem(rng)
            exchanges.append((problem.question, problem.answer))
        yield chat_messages(*exchanges)
