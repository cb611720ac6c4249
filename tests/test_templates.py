"""Chat templates of others: what is written is what Transformers writes, and nothing that a template holds takes long."""

import json
import random
import re
import threading
import time

import pytest
from chat_mutations import mutated_chat
from chat_templates import TEMPLATES, chat_tokenizer, reader
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tiny_hf import tiny_hf_model
from transformers.utils import chat_template_utils

from kvlens import Chat, HookedKVTransformer, KVLensError, KVTransformerBridge, load, templates
from kvlens.cli import main, prompts
from kvlens.files import each_once
from kvlens.templates import written_by_template

ASKED = [{"role": "user", "content": "Who is there?"}]
CHATS = [
    ASKED,
    [{"role": "system", "content": " Be kind. "}, *ASKED],
    [*ASKED, {"role": "assistant", "content": "<think>\nHm.</think>\nI <am> \u00e9\U0001f600."}, *ASKED],
    [{"role": "user", "content": "x y\n" * 20_000}],
]
FEATURES = (
    "{#- what templates of real models use -#}{%- set ns = namespace(first=true, text='', n=0) -%}"
    "{%- macro tool(it, level=1) -%}{{ '  ' * level }}{{ it | tojson(indent=2) | indent(4, true) }}{%- if level < 3 %}"
    "{{ tool(it, level + 1) }}{%- endif %}{%- endmacro -%}"
    "{{- bos_token ~ '%s-%03d' % ('a', 7) ~ '{:>6}|{}'.format('x', [1]) ~ ('%s!' | format('b')) }}"
    "{%- for m in messages[::-1] if m['content'] is string %}{%- set ns.n = ns.n + 1 -%}"
    "{{ loop.index0 % 2 == 0 }}{{ loop.length }}{{ loop.previtem.role if loop.previtem is defined }}{{ loop.cycle('x', 'y') }}"
    "{%- set ns.text = ns.text + m.content.split('</think>')[-1].lstrip('\\n') | replace('x', 'yy') -%}"
    "{%- if loop.last %}{% continue %}{% endif -%}{{ m.content[:5] | upper | trim }}{%- endfor -%}"
    "{{ ns.text[-9:] ~ ns.n }}{{ tool({'a': [1, 2.5, none], 'b': {'c': '<\u00e9>'}}) }}"
    "{{ messages | map(attribute='role') | unique | join(', ') }}{{ ', '.join(messages | map(attribute='role')) }}"
    "{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content | length }}{{ {'b': 1, 'a': 2} | dictsort }}"
    "{{ {'b': 1}.items() | list }}{{ messages[0].get('tool_calls', []) }}{{ '12' | int + 3 ** 2 * 2 }}{{ 2.567 | round(1) }}"
    "{%- set block %}<{{ 'q' | safe }}>{% endset %}{{ block | e }}{{ [1, 2] | sum }}{{ range(3) | list }}"
    "{%- macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}x{% endcall %}"
    "{% filter upper %}abc{% endfilter %}{{ strftime_now('%d %B %Y') }}"
    "{%- for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}{{ 'yes' if ns.first else 'no' }}"
)
"""None of them alone in a real one."""


@pytest.mark.parametrize("name", [*TEMPLATES, "features"])
def test_what_is_written_is_what_transformers_writes(name):
    tokenizer = chat_tokenizer(TEMPLATES.get(name, FEATURES), bos="<|im_start|>")
    options, refused = dict(tokenize=False, add_generation_prompt=True), 0
    for chat in CHATS:
        try:
            expected = tokenizer.apply_chat_template(chat, **options)
        except Exception as error:
            refused += 1
            with pytest.raises(type(error), match=re.escape(str(error))):
                written_by_template(tokenizer, chat, **options)
        else:
            assert expected and written_by_template(tokenizer, chat, **options) == expected
    assert refused == (name == "no system role")  # its template says so


def again(n, text):
    return "{% set x = 'aaaaaaaaaa' %}" + text * n + "{{ x }}"


BIG = "{% set b = 'b' * 99999 %}"
MUCH = "more than 100,170 characters"
LONG = "takes more than 0.25 seconds"
UNSAFE = "is unsafe"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}"
HOSTILE = {
    "{{ 'a' * 10**10 }}": MUCH,
    "{{ 10**10 * [1] }}": MUCH,
    "{{ 7 ** 100000000 }}": "a number of 300,000,000 bits",
    "{% set x = 3**5000 %}{{ x * x }}": "a number of 15,850 bits",
    "{{ ('f' * 10**5) | int(base=16) }}": "a number of 100,000 digits",
    "{{ 1.5 | round(10**9, 'ceil') }}": "width 1000000000",
    "{{ '%1000000000d' % 1 }}": "width 1000000000",
    "{{ '%*d' % (10**9, 1) }}": "width *",
    "{{ '%1000000000d' | format(1) }}": "width 1000000000",
    "{{ '{:>1000000000}'.format(1) }}": "width 1000000000",
    "{{ '{:{}}'.format(1, 10**9) }}": "width 1000000000",
    BIG + "{{ ('%(a)s' * 9999) % {'a': b} }}": MUCH,
    BIG + "{{ ('{0}' * 9999).format(b) }}": MUCH,
    "{{ 'a' | center(10**9) }}": "No filter named 'center'",
    "{{ 'a'.center(10**9) }}": UNSAFE,
    "{{ ('a' | attr('ljust'))(10**9) }}": UNSAFE,
    "{{ 'a'['zfill'](10**9) }}": UNSAFE,
    "{{ (1).to_bytes(10**9, 'big') }}": UNSAFE,
    "{{ ('a\n' * 1000) | indent(10**9) }}": MUCH,
    BIG + "{{ range(99999) | join(b) }}": MUCH,
    BIG + "{{ b.join(range(99999) | map('string')) }}": MUCH,
    BIG + "{{ range(99999) | map(attribute='none', default=b) | join }}": MUCH,
    BIG + "{{ b | replace('b', b) }}": MUCH,
    BIG + "{{ b.replace('', b) }}": MUCH,
    BIG + "{% filter replace('a', b) %}" + "a" * 50_000 + "{% endfilter %}": MUCH,
    again(12, "{% set x = x.replace('a', 'aaaaaaaaaa') %}"): MUCH,
    again(40, "{% set x = x ~ x ~ x %}"): MUCH,
    again(40, "{% set x = x + x %}"): MUCH,
    again(40, "{% set x %}{{ x }}{{ x }}{% endset %}"): MUCH,
    again(60, "{% set x = [x, x] %}"): MUCH,
    again(60, "{% set x = {'a': x, 'b': x} %}"): MUCH,
    again(60, "{% set x = dict(a=x, b=x) %}"): MUCH,
    again(60, "{% set x = namespace(a=x, b=x) %}"): MUCH,
    "{% set n = namespace() %}{% set n.a = n %}{{ n }}": MUCH,
    LOOPS + ENDS: LONG,
    LOOPS + "x" * 50_000 + ENDS: MUCH,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}": LONG,
    "{% for i in range(999) recursive %}{% set z = loop(range(999)) if loop.depth < 20 else '' %}{% endfor %}": LONG,
    "{{ range(99999) | select('in', range(50000) | list) | list | length }}": LONG,
    "{{ range(999) | map(attribute='none', default=[1] * 99) | sum(start=[]) | length }}": "adds up what is no number",
    "{{ lipsum(n=10**7) }}": "'lipsum' is undefined",
    "{{ [1] | batch(10**9, 'x') | list }}": "No filter named 'batch'",
    "{{ [1] | tojson(indent=10**9) }}": "width 1000000000",
    BIG + "{{ range(5000) | list | tojson(separators=(b, b)) }}": "width 199998",
    "{% set c = cycler('a' * 99999) %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}": MUCH,
    "{{ raise_exception('a' * 99999) }}": "a" * 500 + "; change",
    "{# " + "x" * 10**6 + " #}": "it has 1,000,006 characters",
}


@pytest.mark.parametrize("template", HOSTILE, ids=lambda template: template[:40])
def test_what_would_take_long_is_refused(template, monkeypatch):
    """With a lower bound on what each is refused for, which is reached sooner."""
    monkeypatch.setattr(templates, *(("SECONDS", 0.25) if HOSTILE[template] == LONG else ("SHORTEST", 10**5)))
    started = time.thread_time()
    with pytest.raises(KVLensError, match="the tokenizer's chat template cannot write these messages") as refused:
        Chat(ASKED).text(reader(template))
    assert HOSTILE[template] in str(refused.value) and len(str(refused.value)) < 1000
    assert time.thread_time() - started < templates.SECONDS + 2


USUAL = "more than 1,000,170 characters"


def test_the_bounds_grow_with_the_messages():
    repeats = reader("{% for i in range(9) %}{{ messages[0].content }}{% endfor %}")
    assert len(Chat([{"role": "user", "content": "a" * 10**6}]).text(repeats)) == 9 * 10**6
    with pytest.raises(KVLensError, match=USUAL):
        Chat(ASKED).text(reader("{% for i in range(99) %}{{ 'a' * 10**6 }}{% endfor %}"))


def test_every_thread_is_bounded_and_transformers_own_calls_are_as_they_were():
    found = []

    def write():
        try:
            Chat(ASKED).text(reader("{{ 'a' * 10**10 }}"))
        except KVLensError as error:
            found.append(str(error))

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert len(found) == 1 and USUAL in found[0]
    assert type(chat_template_utils._compile_jinja_template("x").environment) is ImmutableSandboxedEnvironment
    assert chat_tokenizer("{{ 'a'.center(3) }}").apply_chat_template(ASKED, tokenize=False) == " a "


def folder_with(template, folder, place):
    tokenizer = chat_tokenizer(None)
    tiny_hf_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if place == "chat_template.jinja":
        (folder / place).write_text(template)
    else:
        said = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps({**said, "chat_template": template}))
    return folder


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "door", [load, HookedKVTransformer.from_pretrained, KVTransformerBridge.boot_transformers], ids=lambda door: door.__name__
)
def test_every_door_holds(door, place, tmp_path):
    model = door(folder_with("{{ 'a' * 10**10 }}", tmp_path, place))
    with pytest.raises(KVLensError, match=USUAL):
        model.to_tokens(Chat(ASKED).text(model))


def test_the_command_line_holds(tmp_path, capsys):
    folder = folder_with("{{ 'a' * 10**10 }}", tmp_path / "m", "chat_template.jinja")
    (tmp_path / "chat.json").write_text(json.dumps(ASKED))
    assert main(["explain", "--model", str(folder), "--messages", str(tmp_path / "chat.json")]) == 2
    assert f"it makes {USUAL}" in " ".join(capsys.readouterr().err.split())


def changed_chats(seeds, folder, monkeypatch, capsys):
    """How many changed files were refused; that the others are read as written, in good time."""
    tokenizer, read, refused = chat_tokenizer(TEMPLATES["ChatML"]), [], 0
    tiny_hf_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given = prompts.given_chat
    monkeypatch.setattr(prompts, "given_chat", lambda args: read.append(given(args)) or read[-1])
    path, command = folder / "chat.json", ["explain", "--model", str(folder), "--depth", "units", "--messages"]
    for seed in seeds:
        kind, changed = mutated_chat([CHATS[1][0], {"role": "user", "content": "Who sat? The cat."}], random.Random(seed))
        path.write_bytes(changed)
        started = time.perf_counter()
        status, said = main([*command, str(path)]), capsys.readouterr().err
        assert time.perf_counter() - started < 20, (seed, kind)
        assert status == 0 or said.splitlines()[-1].startswith("kvlens: error: "), (seed, kind, said)
        if status:
            refused += 1
        else:
            assert read[-1].messages == json.loads(changed, object_pairs_hook=each_once), (seed, kind)
    return refused


@pytest.mark.usefixtures("short_answers")
def test_a_changed_chat_is_refused_or_read_as_written(tmp_path, monkeypatch, capsys):
    assert 20 <= changed_chats(range(40), tmp_path, monkeypatch, capsys) < 40


@pytest.mark.slow
def test_many_changed_chats_are_refused_or_read_as_written(tmp_path, monkeypatch, capsys):
    assert 150 <= changed_chats(range(1000, 1300), tmp_path, monkeypatch, capsys) < 300
