"""Windows of tokens, on which a language model is trained and evaluated.

All documents are concatenated in one flat tensor, with BOS before each. A window of length n is the BOS token and n - 1
consecutive tokens from any position of that tensor. TransformerLens prepends BOS to every prompt, so with the BOS the model
sees the same token at position 0 in training and in use.

Windows may cross from one document into the next; the BOS between them marks the boundary.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvlens.checks import Count, checked
from kvlens.corpus.tokenizer import encode_texts
from kvlens.errors import KVLensError


class TokenWindows:
    """A flat tensor of tokens and the windows cut from it.

    Attributes:
        tokens: Int[Tensor, "total"], on the CPU.
        bos_token_id: the token before each document, and at the start of each window.
        n_documents: number of documents.
        n_chars: number of characters of the tokenized text, or 0 if unknown.
    """

    @checked
    def __init__(self, tokens: Int[Tensor, " total"], bos_token_id: int, *, n_chars: int = 0):
        """Use an existing flat tensor; `from_texts` makes one.

        Raises:
            KVLensError: the tensor is not flat, or does not hold integers.
        """
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise KVLensError(
                f"TokenWindows: tokens must be a flat tensor of integers, got {tokens.dtype} {list(tokens.shape)}"
            )
        self.tokens = tokens.long()
        self.bos_token_id = bos_token_id
        self.n_documents = int((tokens == bos_token_id).sum())
        self.n_chars = n_chars

    @classmethod
    @checked
    def from_texts(cls, texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> "TokenWindows":
        """Tokenize ``texts`` (such as ``[document.text for document in corpus.train]``), BOS before each.

        Raises:
            KVLensError: there is no text, or the tokenizer has no BOS.
        """
        bos = tokenizer.bos_token_id
        pieces = [torch.tensor([bos, *ids]) for ids in encode_texts(tokenizer, texts)]
        return cls(torch.cat(pieces), bos, n_chars=sum(map(len, texts)))

    def __len__(self) -> int:
        """Number of tokens, the BOS of each document included."""
        return self.tokens.numel()

    @property
    def chars_per_token(self) -> float:
        """Characters of text per token, not counting BOS: loss / (ln 2 * this) is bits per character."""
        return self.n_chars / max(1, len(self) - self.n_documents)

    @checked
    def sample(self, batch: Count, length: int, generator: torch.Generator) -> Int[Tensor, "{batch} {length}"]:
        """Return ``batch`` windows at uniformly random positions.

        Args:
            batch: number of windows.
            length: tokens in each.
            generator: source of the randomness, on the CPU; equal seeds give equal windows.

        Raises:
            KVLensError: a window would be longer than the text, or shorter than 2.
        """
        stride = self._stride(length, "sample")
        starts = torch.randint(len(self) - stride + 1, (batch, 1), generator=generator)
        return self._with_bos(self.tokens[starts + torch.arange(stride)])

    @checked
    def consecutive(self, length: int, max_windows: Count | None = None) -> Int[Tensor, "window {length}"]:
        """Return non-overlapping windows in order, for evaluation; an incomplete last window is left out.

        Args:
            length: tokens in each.
            max_windows: return at most this many windows, spread evenly over the text; None returns all.

        Raises:
            KVLensError: a window would be longer than the text, or shorter than 2; ``max_windows`` is below 1.
        """
        stride = self._stride(length, "consecutive")
        n_windows = len(self) // stride
        windows = self.tokens[: n_windows * stride].view(n_windows, stride)
        if max_windows is not None:
            n_kept = min(max_windows, n_windows)
            windows = windows[torch.arange(n_kept) * n_windows // n_kept]
        return self._with_bos(windows)

    def _stride(self, length: int, method: str) -> int:
        """Tokens of text in a window of this length."""
        stride = length - 1
        if length < 2 or stride > len(self):
            raise KVLensError(
                f"TokenWindows.{method}: length must be from 2 to {len(self) + 1} (the text has {len(self)} tokens), got "
                f"{length}"
            )
        return stride

    def _with_bos(self, windows: Int[Tensor, "window stride"]) -> Int[Tensor, "window pos"]:
        return torch.cat([windows.new_full((len(windows), 1), self.bos_token_id), windows], dim=1)
