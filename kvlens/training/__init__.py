"""Training small models on text that every installation holds: corpus, tokenizer, windows, loop.

corpus = build_docs_corpus()
tokenizer = train_bpe_tokenizer(document.text for document in corpus.train)
windows = TokenWindows.from_texts([document.text for document in corpus.train], tokenizer)
heldout = TokenWindows.from_texts([document.text for document in corpus.heldout], tokenizer).consecutive(256, 64)
generator = torch.Generator().manual_seed(0)
result = train(model, lambda: windows.sample(32, 256, generator), steps=1000, learning_rate=1e-3,
               evaluate=lambda model: heldout_loss(model, heldout))
"""

from kvlens.training.context import ContextEffect, context_effect
from kvlens.training.corpus import DocsCorpus, Document, build_docs_corpus
from kvlens.training.data import TokenWindows
from kvlens.training.docs import DocsRecipe, train_docs_linear
from kvlens.training.schedule import Schedule
from kvlens.training.tokenizer import encode_texts, load_tokenizer, train_bpe_tokenizer
from kvlens.training.trainer import TrainResult, decayed_parameters, heldout_loss, train

__all__ = [
    "ContextEffect",
    "DocsCorpus",
    "DocsRecipe",
    "Document",
    "Schedule",
    "TokenWindows",
    "TrainResult",
    "build_docs_corpus",
    "context_effect",
    "decayed_parameters",
    "encode_texts",
    "heldout_loss",
    "load_tokenizer",
    "train",
    "train_bpe_tokenizer",
    "train_docs_linear",
]
