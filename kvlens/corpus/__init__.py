"""A text corpus that every installation contains, its tokenizer, and windows for training and evaluating language models.

corpus = build_docs_corpus()
tokenizer = train_bpe_tokenizer(document.text for document in corpus.train)
windows = TokenWindows.from_texts([document.text for document in corpus.train], tokenizer)
"""

from kvlens.corpus.docs import DocsCorpus, Document, build_docs_corpus
from kvlens.corpus.tokenized import TokenWindows, encode_texts, train_bpe_tokenizer

__all__ = [
    "DocsCorpus",
    "Document",
    "TokenWindows",
    "build_docs_corpus",
    "encode_texts",
    "train_bpe_tokenizer",
]
