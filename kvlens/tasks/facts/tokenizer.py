"""A word-level tokenizer for the stories: one token per word and per punctuation mark.

A token includes the space before it (shown as U+2581), so concatenating the texts of the tokens gives the text: " kite" and
"." for "kite.". The first word of a text gets that space too, so a text has the same tokens alone and after another text;
decoded, it begins with a space. Words outside the vocabulary become ``<|unk|>``. Pronouns come after all other words, and the
words of two-hop stories after the pronouns, so a word has the same id in every vocabulary that contains it.
"""

import re
from collections.abc import Sequence
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvlens.corpus.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS
from kvlens.tasks.facts.words import INSIDE, KINDS, ROOM, Kind
from kvlens.tokenizer import with_bos

UNK = "<|unk|>"
SPACE = "\u2581"
MARKS = (".", "?")
_NAME = "kvlens-facts-words"
_PRONOUNS_NAME = "kvlens-facts-words-and-pronouns"
_HOPS_NAME = "kvlens-facts-words-pronouns-and-hops"


def words_of(sentence: str) -> list[str]:
    """Split ``"Where is Mira?"`` into words and punctuation marks; ``{s}`` and ``{v}`` count as words."""
    return re.findall(r"[\w{}]+|[.?]", sentence)


@cache
def token_ids(pronouns: bool = False, hops: bool = False) -> dict[str, int]:
    """The id of every word and mark, after the special tokens; words of two-hop stories require ``pronouns=True`` as well."""
    words: dict[str, None] = dict.fromkeys((BOS, EOS, PAD, UNK, *MARKS, *_words_of_kinds(KINDS)))
    if pronouns or hops:
        words.update(dict.fromkeys(word for kind in KINDS for word in words_of(kind.pronoun) if word != "{v}"))
    if hops:
        words.update(dict.fromkeys(_words_of_kinds((INSIDE, ROOM))))
    return {word: number for number, word in enumerate(words)}


def _words_of_kinds(kinds: Sequence[Kind]) -> list[str]:
    """The words of the kinds' sentences, then their subjects and values."""
    sentences = [sentence for kind in kinds for sentence in (*kind.statements, kind.question, kind.answer)]
    frame = [word for sentence in sentences for word in words_of(sentence) if word not in ("{s}", "{v}")]
    return [*frame, *(word for kind in kinds for word in (*kind.subjects, *kind.values))]


@cache
def word_tokenizer(pronouns: bool = False, hops: bool = False) -> PreTrainedTokenizerFast:
    """Build the tokenizer: it prepends BOS unless ``add_special_tokens=False``, and pads on the right."""
    special = (BOS, EOS, PAD, UNK)
    ids = {word if word in (*special, *MARKS) else SPACE + word: number for word, number in token_ids(pronouns, hops).items()}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always"),
            pre_tokenizers.Split(Regex(r"[^\w\u2581]"), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="never")
    name = _HOPS_NAME if hops else _PRONOUNS_NAME if pronouns else _NAME
    return with_bos(tokenizer, name, **SPECIAL_TOKENS, unk_token=UNK)
