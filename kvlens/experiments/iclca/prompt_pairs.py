"""Prompts and texts that follow them, for ``gpt2-text``: twelve of each kind, enough for a significance test.

The first three of "facts" are those of ICLCA's tables 3 to 5; the others, like them, are a sentence about someone or something
and a sentence that says "he", "she" or "it". "stories" are for models of children's stories, "help pages" for models of the
documentation of Python: pages of functions that do not exist.
"""

from typing import NamedTuple


class Pair(NamedTuple):
    """A prompt, and the text after it."""

    prompt: str
    text: str


FACTS = (
    Pair("Bill Gates was born at Seattle, Washington.", " He is the CEO of"),
    Pair("Los Angeles is the second most populous city in the United States.", " It is located in the U.S. state of"),
    Pair("Steve Jobs founded Apple.", " He is the founder of"),
    Pair("Marie Curie was born in Warsaw, Poland.", " She received the Nobel Prize in"),
    Pair("The Amazon is the largest river of South America.", " It flows into the"),
    Pair("Roger Federer grew up in Basel, Switzerland.", " He is a professional"),
    Pair("Toyota was founded in 1937 by Kiichiro Toyoda.", " It is a manufacturer of"),
    Pair("The Louvre is the most visited museum in Paris.", " It is home to"),
    Pair("Linus Torvalds wrote his first kernel as a student in Helsinki.", " He is the creator of"),
    Pair("The giant panda lives in the mountains of central China.", " It feeds on"),
    Pair("Serena Williams was born in Saginaw, Michigan.", " She has won more titles in"),
    Pair("Mount Fuji is the highest mountain of Japan.", " It is located near the city of"),
)
STORIES = (
    Pair("Once upon a time, there was a little girl named Lily. She had a red ball.", " She went outside to play with her"),
    Pair("Tom was a big dog. He liked to swim in the lake.", " One day, Tom went to the"),
    Pair("Once upon a time, there was a bird named Bob. Bob could not fly.", " He was very sad because"),
    Pair("Sara and Ben found a box in the garden. It was full of toys.", " They opened the box and saw"),
    Pair("Mia was sick. She had to stay in bed all day.", " Her mom came and gave her some"),
    Pair("There was a cat who liked to eat fish. Her name was Kitty.", " One day, she saw a big"),
    Pair("Tim wanted to bake a cake for his mom.", " He took some sugar and"),
    Pair("The sun was hot. Anna and Max wanted ice cream.", " They asked their dad to buy"),
    Pair("A small frog lived near a pond. He was afraid of the water.", " The other frogs said to him"),
    Pair("Lucy lost her doll in the park. She started to cry.", " A kind man helped her find her"),
    Pair("Once upon a time, there was a king who had a big crown.", " The king was very proud of his"),
    Pair("Jack had a toy car. It was blue and very fast.", " He gave it to his friend because"),
)


def _page(name: str, argument: str, kind: str, what: str) -> Pair:
    prompt = f"{name}({argument})\n\n{what}\n\nParameters\n----------\n{argument} : {kind}\n    What is read.\n\n"
    return Pair(prompt, "Examples\n--------\n>>> ")


HELP_PAGES = (
    _page("count_words", "text", "str", "Count the words of a text."),
    _page("frobnicate", "widget", "Widget", "Frobnicate a widget and return it."),
    _page("invert_matrix", "matrix", "array_like", "Return the inverse of a square matrix."),
    _page("read_table", "path", "str", "Read a table from a file."),
    _page("merge_sorted", "lists", "list", "Merge sorted lists into one."),
    _page("hash_file", "path", "str", "Return the hash of a file."),
    _page("median_filter", "signal", "ndarray", "Apply a median filter to a signal."),
    _page("parse_date", "string", "str", "Parse a date, and return it as a tuple."),
    _page("flatten", "nested", "list", "Flatten a nested list."),
    _page("encode_image", "image", "ndarray", "Encode an image as bytes."),
    _page("open_socket", "address", "tuple", "Open a socket to an address."),
    _page("draw_sample", "weights", "array_like", "Draw a sample by its weights."),
)
PAIRS = {"facts": FACTS, "stories": STORIES, "help pages": HELP_PAGES}
