"""The variants inside a tiny random BERT, and fine-tuning on a made-up folder in the format of CoLA."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from precision import LAW, relative_error
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvlens import KVLensError
from kvlens.dual.bert import fine_tune, load_bert, matthews, read_examples, swap_self_attention

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "the", "cat", "dog", "sat", "ran", "is"]


def bert(num_labels=2, seed=0, dtype=torch.float64):
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17,
        max_position_embeddings=20, num_labels=num_labels, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.BertForSequenceClassification(config).eval().to(dtype)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(12)  # BERT's start of 0.02 is for 768 dimensions; with 12 it would hide every change
    return model


def tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


INPUTS = dict(
    input_ids=torch.tensor([[2, 4, 6, 7, 3], [2, 5, 3, 0, 0]]), attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
)


@pytest.mark.parametrize(
    "variant",
    [
        dict(regularised=dict(alpha=0.0)),
        dict(negative=dict(k=2, beta=0.0)),
        dict(augmented=dict(keys=True, values=True, depth=2, parallel=0.5)),
    ],
)
def test_variants_that_are_nothing_leave_bert_as_it_was(variant):
    before = bert()(**INPUTS).logits
    after = swap_self_attention(bert(), variant)(**INPUTS).logits
    assert relative_error(after, before) < LAW


@pytest.mark.parametrize(
    "variant",
    [
        dict(regularised=dict(alpha=-0.5, form="normalised")),
        dict(regularised=dict(alpha=0.3, form="one_step")),
        dict(negative=dict(k=0.5, beta=0.3)),
        dict(negative=dict(k=1, beta=0.3, per="label")),
    ],
)
def test_variants_change_the_output_and_do_not_see_padding(variant):
    plain, model = bert()(**INPUTS).logits, swap_self_attention(bert(), variant)
    out = model(**INPUTS).logits
    assert (out - plain).abs().max() > 1e-5  # far above rounding
    alone = model(input_ids=INPUTS["input_ids"][1:, :3], attention_mask=INPUTS["attention_mask"][1:, :3]).logits
    assert relative_error(out[1:], alone) < LAW


def test_one_layer_by_hand():
    """The normalised form on the first layer: (softmax(q.k) v - alpha v) / (1 - alpha), head by head."""
    model = swap_self_attention(bert(), dict(regularised=dict(alpha=-0.5, form="normalised")))
    x = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    attention = model.bert.encoder.layer[0].attention.self
    out, _ = attention(x)
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        q, k, v = (f(x[0])[:, part] for f in (attention.query, attention.key, attention.value))
        expected = ((q @ k.T / 2).softmax(-1) @ v + 0.5 * v) / 1.5
        assert relative_error(out[0, :, part], expected) < LAW


@pytest.mark.parametrize("part", ["key", "value"])
def test_the_parallel_adapter_reads_the_input_of_the_block(part):
    """W_V x + b_V + c W_2 gelu(W_1 x): 12-24-12 here, 768-1536-768 in BERT-base; the other projection is left alone."""
    attention = (
        swap_self_attention(bert(), dict(augmented={f"{part}s": True, "depth": 2, "parallel": 0.3}))
        .bert.encoder.layer[0]
        .attention.self
    )
    first, second = attention.key_adapter or attention.value_adapter
    assert (first.shape, second.shape) == ((1, 12, 24), (1, 24, 12)) and not (attention.key_adapter and attention.value_adapter)
    second.data.normal_(generator=torch.Generator().manual_seed(2))
    x = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    branch = 0.3 * torch.nn.functional.gelu(x @ first[0]) @ second[0]
    q, k, v = attention.query(x), attention.key(x) + branch * (part == "key"), attention.value(x) + branch * (part == "value")
    q, k, v = (whole.unflatten(-1, (3, 4)).transpose(1, 2) for whole in (q, k, v))
    expected = ((q @ k.transpose(-1, -2) / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
    assert relative_error(attention(x)[0], expected) < LAW


def test_every_weight_of_an_adapter_trains():
    model = swap_self_attention(bert(), dict(augmented=dict(keys=True, values=True, depth=2, parallel=0.5)))
    adapters = {name: parameter for name, parameter in model.named_parameters() if "adapter" in name}
    assert len(adapters) == 2 * 2 * 2
    for parameter in adapters.values():
        parameter.data.add_(0.01)  # the last starts at 0, and the first has no gradient until it has left it
    model(**INPUTS, labels=torch.tensor([0, 1])).loss.backward()
    assert all(float(parameter.grad.abs().max()) > 0 for parameter in adapters.values())


def saved(folder, model, **config):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_a_bert_is_loaded_with_a_new_classifier(tmp_path):
    """From a folder of the whole classifier, or of the BERT without one, as BERT's own checkpoints are."""
    whole = bert(3, dtype=torch.float32)
    with torch.no_grad():
        expected = whole.bert(**INPUTS).last_hidden_state
    for folder, model in ((tmp_path / "whole", whole), (tmp_path / "base", whole.bert)):
        (first, words), (same, _), (other, _) = (load_bert(saved(folder, model), seed) for seed in (0, 0, 1))
        assert relative_error(first.bert(**INPUTS).last_hidden_state, expected) < 1e-6  # float32, and equal weights
        assert torch.equal(first.classifier.weight, same.classifier.weight)
        assert not torch.equal(first.classifier.weight, other.classifier.weight)
        assert first.config.num_labels == 2 and words("the cat")["input_ids"] == [2, 6, 7, 3]


def test_what_is_no_bert(tmp_path):
    model = bert(dtype=torch.float32)
    with pytest.raises(KVLensError, match="does not exist"):
        load_bert(tmp_path / "nothing")
    with pytest.raises(KVLensError, match="type 'gpt2'"):
        load_bert(saved(tmp_path / "gpt2", model, model_type="gpt2"))
    with pytest.raises(KVLensError, match="num_hidden_layers of the configuration is 3"):
        load_bert(saved(tmp_path / "deeper", model, num_hidden_layers=3))
    with pytest.raises(KVLensError, match="max_position_embeddings|other shapes"):
        load_bert(saved(tmp_path / "longer", model, max_position_embeddings=30))
    folder = saved(tmp_path / "pickle", model)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(KVLensError, match=r"no model.safetensors"):
        load_bert(folder)


def test_what_cannot_be_swapped():
    with pytest.raises(KVLensError, match="a weight c beside them"):
        swap_self_attention(bert(), dict(augmented=dict(values=True)))
    with pytest.raises(KVLensError, match="causally"):
        swap_self_attention(bert(), dict(ridge=dict(strength=1.0)))


def write_cola(folder, n=24):
    """Sentences with "good" are acceptable, those with "bad" not; a quote in front, as GLUE has them, unpaired."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for split in ("train", "dev"):
        rows = []
        for _ in range(n):
            good, animal = bool(generator.integers(2)), ["cat", "dog"][generator.integers(2)]
            rows.append(f'src\t{int(good)}\t\t" the {animal} is {"good" if good else "bad"}')
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def test_fine_tuning_learns_a_made_up_task(tmp_path):
    folder = write_cola(tmp_path / "cola")
    assert all(one.startswith('" the ') for one in read_examples(folder, "dev")[0])
    model = swap_self_attention(bert(dtype=torch.float32), dict(regularised=dict(alpha=-0.1), negative=dict(k=1, beta=0.1)))
    frame = fine_tune(model, tokenizer(), folder, epochs=12, batch_size=8, learning_rate=1e-2)
    assert frame["epoch"].tolist() == list(range(1, 13))
    assert frame["train_loss"].iloc[-1] < 0.5 * frame["train_loss"].iloc[0]
    assert frame["matthews"].iloc[-1] > 0.9


def test_the_metric_by_hand():
    predicted, labels = np.array([1.0, 1, 0, 0]), np.array([1.0, 0, 0, 0])
    assert matthews(predicted, labels) == pytest.approx(1 / math.sqrt(3))
    assert matthews(np.zeros(4), labels) == 0.0  # as table 1 has it
