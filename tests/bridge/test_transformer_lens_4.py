"""With TransformerLens 4 installed, code that extends its removed classes says what it needs."""

from importlib.metadata import version

import pytest

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError

pytestmark = pytest.mark.skipif(
    version("transformer-lens").startswith("3."),
    reason="TransformerLens 3 is installed, which has HookedTransformer; put release 4 first on the path",
)
SIZES = dict(n_layers=1, d_model=4, d_head=2, n_ctx=4, d_vocab=4, act_fn="gelu")


@pytest.mark.unhooked
@pytest.mark.parametrize(
    "make",
    [
        lambda: HookedKVTransformer.from_zoo("bigram-linear"),
        lambda: HookedKVTransformerConfig(**SIZES),
        lambda: HookedKVTransformer(SIZES),
    ],
    ids=["zoo", "config", "model"],
)
def test_a_hooked_transformer_says_that_it_needs_release_3(make):
    with pytest.raises(KVLensError, match="needs transformer-lens>=3.9,<4"):
        make()
