"""README's first command says what README prints, of the causes, on a real model."""

import re
import shlex
import subprocess
from pathlib import Path

from test_examples import named

from kvlens.cli import main

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
