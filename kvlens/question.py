"""The question in a message: the words that are never removed, while everything else of the message is cut into units.

In most user messages the last sentences ask, and what comes before is what they are about. A sentence asks if it ends in a
question mark or a colon, or begins as an English question or instruction does; in other languages only its end decides.
"""

import re
from itertools import groupby, pairwise, takewhile

from kvlens.arguments import Span
from kvlens.units import spans_of

FEW_WORDS = 3
"""Of a paragraph that may stand behind the question."""
_BLANK_LINES = re.compile(r"\n\s*\n\s*")
_ENDS_ASKING = re.compile(r"[?？؟:：][\"'”’)\]*_\s]*$")
_FIRST = r"""(?: please | kindly | now | then | also | and | so | just | only | first | next | finally )\b,? \s*"""
_CLAUSE = r"""(?: [^\s,.;]+ \s ){1,7} [^\s,.;]+ , \s* (?: please \s )?"""
_VERBS = (
    "add analyse analyze answer ask calculate categorise categorize check choose cite classify compare complete "
    "compose compute continue convert correct count create decide define describe determine draft edit estimate "
    "evaluate explain extract fill find fix format generate give guess help identify improve keep list look make "
    "mention name outline output paraphrase pick predict print provide quote rank read recommend repeat rephrase "
    "reply report respond return review rewrite say select show simplify solve sort state suggest summarise "
    "summarize tell think translate use verify write"
)
_ASKS = re.compile(
    rf"""[\s"'“‘(\[*_\#>-]* (?: \d+[.)] \s+ )? (?: {_FIRST} )* (?: {_CLAUSE} )?
    (?: (?: what | which | who | whom | whose | how | why | is | are | was | were | do | does | did | don't | can | could
    | would | should | be | i \s want \s you | you \s (?: must | should ) | your \s (?: task | job ) | let \s me
    | {"|".join(_VERBS.split())} ) \b | please \s )""",
    re.VERBOSE | re.IGNORECASE,
)


def question_in(message: str) -> Span:
    """The characters of a user's message that ask; the first of these that there are:

    1. the sentences that ask at the end of the last paragraph, with the paragraphs before it that do nothing but ask, and with
       a few words behind it (``Answer:``, ``Thank you!``);
    2. such a cue for the answer alone;
    3. the sentences that ask at the beginning of the message (``Summarize this text:``);
    4. the last ones that ask in the last paragraph, where others stand behind them (``Where is it? It was in May.``);
    5. the last paragraph; of a single paragraph the last line; of a single line the whole message.

    >>> message = "The office moves to Rotterdam. The rent is low. In which city is it? Answer in one word."
    >>> start, stop = question_in(message)
    >>> message[start:stop]
    'In which city is it? Answer in one word.'
    """
    edges = [0, *(blank.end() for blank in _BLANK_LINES.finditer(message) if blank.end() < len(message)), len(message)]
    paragraphs = [*pairwise(edges)]
    words_behind = [*takewhile(lambda span: _is_few_words(message[slice(*span)]), paragraphs[:0:-1])]
    asked = paragraphs[: len(paragraphs) - len(words_behind)]
    at_the_end, at_the_beginning = _asking(message, asked[-1]), _asking(message, asked[0])
    has_cue = any(_is_cue(message[slice(*span)]) for span in words_behind)
    if at_the_end and (at_the_end[-1][1] == asked[-1][1] or has_cue):
        start, _ = at_the_end[-1]
        above = takewhile(lambda span: start == asked[-1][0] and _asking(message, span) == [span], asked[-2::-1])
        return min([start, *(first for first, _ in above)]), len(message)
    if has_cue:
        return words_behind[-1][0], len(message)
    if at_the_beginning and at_the_beginning[0][0] == 0:
        return at_the_beginning[0]
    if at_the_end:
        return at_the_end[-1]
    return [(0, 0), *spans_of(message, "paragraph")][-1][0], len(message)


def _asking(message: str, paragraph: Span) -> list[Span]:
    """The runs of sentences of a paragraph that ask; an indented line is code, in which ``return`` instructs nobody."""
    first, last = paragraph
    sentences = [(first + start, first + stop) for start, stop in spans_of(message[first:last], "sentence")]

    def does_ask(span: Span) -> bool:
        sentence = message[slice(*span)]
        is_indented = span[0] > 0 and message[span[0] - 1] == "\n" and sentence.startswith((" ", "\t"))
        return not is_indented and asks(sentence)

    runs = [[*run] for those_that_ask, run in groupby(sentences, does_ask) if those_that_ask]
    return [(run[0][0], run[-1][1]) for run in runs]


def asks(sentence: str) -> bool:
    """Whether a sentence asks or instructs, by its end and its first words."""
    return bool(_ENDS_ASKING.search(sentence) or _ASKS.match(sentence))


def _is_few_words(paragraph: str) -> bool:
    """Whether a paragraph is a cue for the answer, or a few words that ask nothing."""
    return len(paragraph.split()) <= FEW_WORDS and (_is_cue(paragraph) or not asks(paragraph))


def _is_cue(paragraph: str) -> bool:
    """Whether a paragraph is a heading or ends in a colon: behind it the answer is expected."""
    return paragraph.rstrip().endswith((":", "：")) or paragraph.startswith("#")
