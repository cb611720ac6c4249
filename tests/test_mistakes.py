"""What users get wrong most often, and the message that each mistake gets: what was expected, what came, what to do."""

import functools
import shlex

import pytest
import torch
from small_models import linear_model, small_model, tokens
from tiny_text_model import PROMPT, TEXT, linear, softmax, tiny_text_model

from kvlens import Chat, HookedKVTransformer, HookedKVTransformerConfig, KVBias, KVLensError, analyses, convert_prompt
from kvlens.cli import main

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own


@functools.cache
def bias(prompt=PROMPT):
    return convert_prompt(linear(), prompt)


def batch_of_prompts(model=linear):
    return convert_prompt(model(), [PROMPT, "The widget", "Return"])


@functools.cache
def learned_positions():
    return tiny_text_model(positional_embedding_type="standard")


def under(of, text, model=linear):
    with model().kv_bias(of()):
        model()(text)


def lengths():
    return convert_prompt(softmax(), PROMPT), convert_prompt(softmax(), "The widget")


def configured(**changes):
    sizes = dict(n_layers=1, d_model=8, d_head=4, n_ctx=16, d_vocab=11, act_fn="gelu")
    return HookedKVTransformerConfig(**{**sizes, **changes})


def attributed(**given):
    return analyses.prompt_attribution(linear(), PROMPT, TEXT, **given)


def replaced():
    return convert_prompt(linear(), torch.arange(9), replace={(2, 5): torch.tensor([1])})


MISTAKES = {
    "corrupted prompts of another length": (
        lambda: analyses.circuit(softmax(), PROMPT, "The widget"),
        "corrupted: prompt 0 has 5 tokens, and its clean one 18; replace words by others of as many tokens (what "
        "both go on with is text=)",
    ),
    "a head that does not exist": (
        lambda: analyses.why_attends(softmax(), PROMPT, TEXT, 1, 7),
        "layer 1, head 7: this model has no such head; layer 1 has 3 heads, counted from 0",
    ),
    "answers as a metric": (
        lambda: analyses.circuit(softmax(), PROMPT, PROMPT, (3, 5)),
        "metric: expected a function of logits, or words as answer= and rival=, got (3, 5)",
    ),
    "a metric that is one number for all": (
        lambda: analyses.circuit(softmax(), PROMPT, PROMPT, lambda logits: logits.mean()),
        "metric: expected a tensor of one finite number for each of 1 pairs, got tensor(",
    ),
    "tokens as a list, not a tensor": (
        lambda: linear()([[1, 2, 3]]),
        "forward: expected a string, a list of strings, or token ids as a tensor [pos] or [batch, pos], got [[1, 2, 3]]",
    ),
    "text for a model of token ids": (
        lambda: convert_prompt(linear_model(), "some text"),
        "prompt: this model has no tokenizer, so it cannot read text; give token ids",
    ),
    "tokens of another tokenizer": (
        lambda: convert_prompt(linear(), torch.tensor([5, 50256])),
        "token ids must lie in 0..276 (d_vocab=277), got 5..50256",
    ),
    "a text that is too long": (
        lambda: small_model(positional_embedding_type="standard")(tokens(1, 42)),
        "a text of 42 tokens is longer than n_ctx=41: shorten it",
    ),
    "a mask of another size": (
        lambda: linear()(torch.arange(5)[None], attention_mask=torch.ones(1, 4)),
        "forward: attention_mask must be a tensor [1, 5], a value per token, got Tensor of shape [1, 4]",
    ),
    "a misspelt hook point": (
        lambda: linear().run_with_cache(TEXT, names_filter="blocks.0.attn.hook_patern"),
        "no hook point is called 'blocks.0.attn.hook_patern'; did you mean 'blocks.0.attn.hook_pattern'?",
    ),
    "a misspelt field of the configuration": (
        lambda: HookedKVTransformer.from_hooked_transformer(linear(), n_layer=2),
        "config: no field is called 'n_layer'; did you mean 'n_layers'?",
    ),
    "a misspelt value of the configuration": (
        lambda: configured(attention="linaer"),
        "attention must be one of softmax, linear, got 'linaer'; did you mean 'linear'?",
    ),
    "fields that contradict each other": (
        lambda: configured(attention="linear", positional_embedding_type="alibi"),
        "config: attention='linear' cannot be combined with ALiBi: it adds to softmax scores; linear attention has no softmax "
        "scores to act on",
    ),
    "a misspelt model of the zoo": (lambda: HookedKVTransformer.from_zoo("doc-linear"), "did you mean 'docs-linear'?"),
    "a misspelt method": (
        lambda: convert_prompt(softmax(), PROMPT, method="landmrk"),
        "got 'landmrk'; did you mean 'landmark'?",
    ),
    "a misspelt option of a method": (
        lambda: convert_prompt(softmax(), PROMPT, method="landmark", n_feature=3),
        "convert_prompt: with method=\"landmark\" no argument is called 'n_feature'; did you mean 'n_features'?",
    ),
    "no number of keys": (
        lambda: convert_prompt(softmax(), PROMPT, method="landmark"),
        "Landmark: needs n_keys (or n_features), the keys per key-value head, or ratio, a fraction of the prompt's keys",
    ),
    "a method for linear attention": (
        lambda: convert_prompt(linear(), PROMPT, method="landmark", n_keys=3),
        "with linear attention the conversion is always exact and has no options",
    ),
    "a bias of another model": (
        lambda: under(bias, TEXT, softmax),
        "A bias fits only the model that it was converted with; convert the prompt again with this one.",
    ),
    "a batch of prompts, and other texts": (
        lambda: under(batch_of_prompts, tokens(2, 4)),
        "the attached bias holds 3 prompts and the input has batch 2: give one row per prompt, or attach the bias of a single "
        "prompt, which serves every row",
    ),
    "the same, where positions are learned": (
        lambda: under(lambda: batch_of_prompts(learned_positions), tokens(2, 4), learned_positions),
        "the attached bias holds 3 prompts and the input has batch 2",
    ),
    "a batch where one prompt is asked for": (
        lambda: analyses.bias_singular_values(linear(), batch_of_prompts()),
        "batch of 3",
    ),
    "prompts of other lengths, added": (
        lambda: lengths()[0] + lengths()[1],
        "so the text would start at different positions; kvlens.combine(a, b, shift_state='last') uses the last one's offset. "
        "To read one prompt after another, use convert_prompt(model, b, initial=bias_of_a)",
    ),
    "prompts of other lengths, subtracted": (
        lambda: lengths()[0] - lengths()[1],
        "Convert prompts of equal length where a - b is to be read",
    ),
    "fewer tokens than they replace": (replaced, "replace: expected 3 tokens, as many as they replace, got 1"),
    "a chat, and a model of text": (
        lambda: convert_prompt(linear(), [{"role": "user", "content": "Where is it?"}]),
        "this model's tokenizer has no chat template, so the model reads plain text and no chat; give the prompt as text",
    ),
    "a chat that the assistant ends": (
        lambda: Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
        "messages: the last one is the assistant's, and the model answers what stands before; leave it out",
    ),
    "a question that is not in the chat": (
        lambda: Chat([{"role": "user", "content": "Where is it?"}], question="Where is she?"),
        "question: 'Where is she?' occurs 0 times in the user's last message, expected once; copy from it the words that ask",
    ),
    "a misspelt unit": (lambda: attributed(by="sentense"), "got 'sentense'; did you mean 'sentence'?"),
    "a passage that is not in the prompt": (
        lambda: attributed(by=["the widgets"]),
        "by: 'the widgets' does not occur in the prompt; the nearest is 'The widget'; give strings as they stand there",
    ),
    "the path of another file": (lambda: KVBias.load("nowhere.safetensors"), "KVBias.load: no file at nowhere.safetensors"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_message_that_says_what_to_do(mistake, refuses):
    call, words = MISTAKES[mistake]
    refuses(words, call)


COMMANDS = {
    "kvlens trian induction": "did you mean 'train'?",
    "kvlens explain --prompt a --text b --answr c": "did you mean '--answer'?",
    "kvlens explain --prompt a": "--text is missing: give both a prompt and a text",
    "kvlens explain --prompt a --text b --model docs-liner": "did you mean 'docs-linear'?",
    "kvlens explain --prompt-file nowhere --text b": "--prompt-file: cannot read nowhere: No such file or directory",
    "kvlens train induction --out m --set stepz=3": "no field is called 'stepz'; did you mean 'steps'?",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_on_the_command_line_is_one_line(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 2
    line = capsys.readouterr().err
    assert line.startswith("kvlens: error: ") and line.count("\n") == 1 and COMMANDS[command] in line


def test_a_model_is_as_it_was_after_a_mistake():
    with pytest.raises(KVLensError):
        under(bias, torch.tensor([[10**6]]))
    assert linear().attached_kv_bias is None and linear().fingerprint() == tiny_text_model().fingerprint()
