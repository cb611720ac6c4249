"""A byte-level BPE tokenizer, trained on given texts, that TransformerLens accepts without a network.

Byte-level means that the alphabet is the 256 bytes: any Unicode text can be encoded, and decoding returns exactly the encoded
text. Small vocabularies (1024) suit small models: the embedding stays small, and each token is seen often.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.tokenizer import with_bos

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
MIN_VOCAB_SIZE, MOST_TOKENS = 256 + 3, 2**20
_NAME = "kvlens-byte-bpe"


@checked
def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; equal texts give an equal tokenizer.

    Args:
        texts: texts on which merges are counted, read once.
        vocab_size: size of the vocabulary: 3 special tokens (BOS 0, EOS 1, PAD 2), 256 bytes, the rest merges. It is smaller
            if no pair is left that occurs twice in the texts.

    Returns:
        A tokenizer that pads on the right, prepends BOS unless ``add_special_tokens=False``, and decodes losslessly. As with
        every Hugging Face tokenizer, the spelling of a special token in a text is read as that token.

    Raises:
        KVLensError: ``vocab_size`` is below 259, or above a million; ``texts`` is one string, empty, or has other values.
    """
    if not MIN_VOCAB_SIZE <= vocab_size <= MOST_TOKENS:  # tokenizers allocates memory for all at once, and may abort
        raise KVLensError(
            f"train_bpe_tokenizer: vocab_size must be at least {MIN_VOCAB_SIZE} (256 bytes and 3 special tokens) and at most "
            f"{MOST_TOKENS}, got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    n_texts = 0

    def counted() -> Iterable[str]:
        nonlocal n_texts
        for text in texts:
            n_texts += 1
            yield text

    tokenizer.train_from_iterator(counted(), trainer)
    if n_texts == 0:
        raise KVLensError("train_bpe_tokenizer: texts is empty; there is nothing to learn merges from")
    return restored_tokenizer(tokenizer)


def restored_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A trained byte-level BPE, as `train_bpe_tokenizer` returns it."""
    return with_bos(tokenizer, _NAME, **SPECIAL_TOKENS)


@checked
def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Return each text's token ids, without BOS, in one parallel call (megabytes per second)."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]
