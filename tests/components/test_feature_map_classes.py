"""What each feature map states about itself, and a map of one's own, which the whole library takes from one line."""

import pytest
import torch
from precision import LAW, relative_error

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError, convert_prompt
from kvlens.components import FEATURE_MAPS, FeatureMap
from kvlens.components.linear_attention import accumulates_in

SIZES = dict(n_layers=2, n_heads=4, d_model=24, d_head=6, n_ctx=40, d_vocab=17, act_fn="gelu", attention="linear", seed=0)


def config(**changes):
    return HookedKVTransformerConfig(**{**SIZES, "n_random_features": 13, "device": "cpu", **changes})


def test_dimensions_by_hand():
    dims = {name: config(feature_map=name).d_phi for name in FEATURE_MAPS}
    assert dims == {"identity": 6, "elu_plus_one": 6, "relu": 6, "random": 13, "taylor": 43, "hedgehog": 12}
    assert config(feature_map="random", n_random_features=None).d_phi == 12


def test_placements_and_precisions_by_hand():
    rotary = dict(positional_embedding_type="rotary")
    placements = {name: config(feature_map=name, **rotary).rotary_placement for name in FEATURE_MAPS}
    after = dict.fromkeys(("identity", "elu_plus_one", "relu"), "after")
    assert placements == {**after, **dict.fromkeys(("random", "taylor", "hedgehog"), "before")}
    wide = {name for name in FEATURE_MAPS if accumulates_in(config(feature_map=name)) == torch.float64}
    assert wide == {"random", "hedgehog"}


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_features_are_as_many_as_stated_and_positive_where_stated(name):
    cfg = config(feature_map=name, n_key_value_heads=2)
    feature_map = FEATURE_MAPS[name](cfg, 2.5)
    feature_map.init_weights(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(3, 200, heads, 6, generator=generator) for heads in (4, 2))
    phi_q, phi_k = feature_map(q), feature_map(k)
    assert phi_q.shape == (3, 200, 4, cfg.d_phi)
    assert phi_k.shape == (3, 200, 2, cfg.d_phi)
    assert feature_map.positive == bool((phi_q >= 0).all() and (phi_k >= 0).all())
    expected = feature_map(k.repeat_interleave(2, dim=2))  # query heads 0 and 1 read key-value head 0
    assert torch.equal(expected, phi_k.repeat_interleave(2, dim=2))


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_state_dict_names_stay(name):
    """A bias's fingerprint hashes them: with another name it would load and not attach."""
    model = HookedKVTransformer(config(feature_map=name))
    own = {key for key in model.state_dict() if ".feature_map." in key}
    held = {"random": "projection", "hedgehog": "hedgehog_weight"}.get(name)
    assert own == ({f"blocks.{layer}.attn.feature_map.{held}" for layer in range(2)} if held else set())


class Squares(FeatureMap):
    """phi(x) = x^2, of even width only; serves the tests."""

    kind = "squares"
    positive = True
    rotary_placement = "after"

    @classmethod
    def check(cls, cfg):
        if cfg.d_head % 2:
            raise KVLensError(f"feature_map='squares' needs an even d_head, got {cfg.d_head}")

    def forward(self, x):
        return x.square()


def test_a_custom_feature_map_converts_exactly_and_may_refuse(monkeypatch, tmp_path):
    with pytest.raises(KVLensError, match="squares"):
        config(feature_map="squares")
    monkeypatch.setitem(FEATURE_MAPS, "squares", Squares)
    with pytest.raises(KVLensError, match="needs an even d_head"):
        config(feature_map="squares", d_head=5)
    cfg = config(feature_map="squares", positional_embedding_type="rotary", dtype=torch.float64)
    assert (cfg.rotary_placement, cfg.d_phi) == ("after", 6)
    model = HookedKVTransformer(cfg)
    model.save(tmp_path / "m")
    model = HookedKVTransformer.load(tmp_path / "m")
    tokens = torch.arange(15)[None]
    with model.kv_bias(convert_prompt(model, tokens[0, :9])):
        got = model(tokens[:, 9:])
    assert relative_error(got, model(tokens)[:, 9:]) < LAW


class TwiceAsWide(Squares):
    """Forgets to say that it has two features per dimension."""

    kind = "twice"

    def forward(self, x):
        return torch.cat([x.square(), x.square()], dim=-1)


def test_a_map_that_states_another_number_of_features_makes_no_bias(monkeypatch):
    monkeypatch.setitem(FEATURE_MAPS, "twice", TwiceAsWide)
    with pytest.raises(KVLensError, match="b_kv of layer 0 must be"):
        convert_prompt(HookedKVTransformer(config(feature_map="twice")), torch.arange(9))
