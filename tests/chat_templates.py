"""Chat templates in the shapes of real models', written anew, and a tiny tokenizer that reads them."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from tiny_text_model import tiny_text_model, tiny_tokenizer
from tokenizers import processors

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_3 = (
    "{%- for m in messages %}{%- set words = m.content %}"
    "{%- if m.role == 'assistant' and '</think>' in words %}"
    "{%- set words = words.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + words + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA_3 = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set first = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set first = '' %}{%- endif %}"
    "{{- '<|start|>system<|end|>\n\nToday Date: 26 Jul 2024\n\n' + first + '<|eot|>' }}"
    "{%- for m in messages %}{{- '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}"
)
GEMMA_3 = (
    "{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- set before = messages[0].content + '\n\n' -%}"
    "{%- set turns = messages[1:] -%}{%- else -%}{%- set before = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- for m in turns -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{%- endif -%}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (before if loop.first else '') }}"
    "{{ m.content | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
MISTRAL = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{%- set turns = messages[1:] if system else messages %}{{- bos_token }}{%- for m in turns %}"
    "{%- if m.role == 'user' and loop.last and system %}{{- '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}{%- endfor %}"
)
PHI_4 = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.role | upper + ': ' + m.content | trim + '\n' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TEMPLATES = {
    "ChatML": CHATML,
    "Qwen 3": QWEN_3,
    "Llama 3": LLAMA_3,
    "Gemma 3": GEMMA_3,
    "Mistral": MISTRAL,
    "Phi 4": PHI_4,
    "no system role": NO_SYSTEM,
}
MARKS = ["<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start|>", "<|end|>", "<|eot|>"]
MARKS += ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]


def chat_tokenizer(template: str | None, bos: str | None = None) -> Any:
    """A byte-level tokenizer with the marks as special tokens, of which one may be its BOS."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"extra_special_tokens": MARKS})
    if bos is not None:
        tokenizer.bos_token = bos
        ids = [(bos, tokenizer.convert_tokens_to_ids(bos))]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
    tokenizer.chat_template = template
    return tokenizer


def reader(template: str | None, n_ctx: int = 4096) -> Any:
    """What a chat asks of a model, without the model."""
    cfg = SimpleNamespace(device=torch.device("cpu"), n_ctx=n_ctx, has_position_limit=True)
    return SimpleNamespace(
        tokenizer=chat_tokenizer(template),
        cfg=cfg,
        check_tokens=lambda tokens: None,
        prepends_bos=True,
        attached_kv_bias=None,
    )


def chat_model(template: str = CHATML, **changes: Any) -> Any:
    """A tiny model that reads chats; the BOS of ChatML begins a message."""
    tokenizer = chat_tokenizer(template, "<|im_start|>" if template == CHATML else None)
    model = tiny_text_model(n_ctx=256, d_vocab=len(tokenizer), **changes)
    model.set_tokenizer(tokenizer)
    return model
