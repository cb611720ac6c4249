"""The examples of EXPLANATIONS.md name the causes that the page names, and README's first command the one that it names."""

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import kvlens
from kvlens.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "EXPLANATIONS.md").read_text(encoding="utf-8")
SETUP, *EXAMPLES = PAGE.split("\n## ")
NAMED = re.compile(r"Without (.*?), the model says|(No part) loses|(None of the parts) loses", re.DOTALL)


def block(language, text):
    return re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)[1]


@pytest.fixture(scope="module")
def namespace(smollm2):
    """What the page's first lines make, with the model that the other tests have loaded, since a load takes half a minute."""
    found: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvlens, "load", {"smollm2.gguf": smollm2}.__getitem__)
        exec(block("python", SETUP), found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=[text.splitlines()[0].lower().replace(" ", "_") for text in EXAMPLES])
def test_an_example_names_the_causes_that_the_page_names(example, namespace):
    """Not the numbers, nor every word that is said instead, which may hang on the last bit of a processor."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block("python", example), dict(namespace))
    assert named(printed.getvalue()) == named(block("text", example))


def named(text):
    """Parts without which something else is said, and whether none loses the answer."""
    return [next(filter(None, each)) for each in NAMED.findall(" ".join(text.split()))]


README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_first_command_names_the_cause_that_the_readme_names(smollm2_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands, printed = (re.search(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)[1] for language in ("bash", "text"))
    _, write, explain = commands.splitlines()
    subprocess.run(["bash", "-c", write], check=True)
    _, *words = shlex.split(explain)
    words.remove("--download")
    words[words.index("--model") + 1] = str(smollm2_file)
    assert main(words) == 0
    assert (
        named(capsys.readouterr().out) == named(printed) == ['minutes.txt, sentence 2 ("The new office will be in Rotterdam.")']
    )
