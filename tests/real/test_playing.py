"""`kvlens app` with a real model, in Chromium, as two people use it at once."""

import pytest
from driven_chromium import driven_chromium
from test_app import command
from test_chromium import CHROMIUM, WITHOUT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)]

ASK, STATE = "document.querySelector('form').requestSubmit()", "document.querySelector('.state').textContent"
PATIENCE = 1200


def test_two_people_a_stopped_run_and_a_model_that_cannot_be_loaded(smollm2_file, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(smollm2_file.read_bytes()[:5000])
    with command(str(smollm2_file), str(damaged)) as address, driven_chromium(tmp_path) as browser:
        first, second = browser.page(address), browser.page(address, width=400)
        first.evaluate("document.querySelector('[name=question]').value = 'How much is the rent?'")
        first.evaluate(ASK)
        first.until(f"{STATE}.startsWith('loading')")
        second.evaluate(ASK)
        second.until(f"{STATE} === 'Another run is going; yours is next.'")

        first.evaluate("document.querySelector('.stop').click()")
        assert first.until(f"document.querySelector('.stop').disabled && {STATE}") == "Stopped. What you typed is still here."
        assert first.evaluate("document.querySelector('[name=question]').value") == "How much is the rent?"

        second.until("!document.querySelector('.told').hidden", PATIENCE)  # word by word
        second.until("document.querySelectorAll('.switched').length === 3", PATIENCE)
        answer = second.evaluate("document.querySelector('.result .response').textContent")
        assert "Rotterdam" in answer and "[1]" in answer
        assert "sentence 2" in second.evaluate("document.querySelector('.result .citations').textContent")
        second.evaluate("document.querySelectorAll('.switched input')[1].click()")
        second.until("!!document.querySelector('.without p')", PATIENCE)
        without = second.evaluate("document.querySelector('.without p').textContent")
        assert without.startswith("Without document 1, sentence 2, the model says") and "Rotterdam" not in without
        second.evaluate("document.querySelector('[data-claim]').click()")
        second.until("document.querySelectorAll('.layers .layer').length === 30", PATIENCE)
        second.until("!!document.querySelector('.without p')", PATIENCE)

        second.evaluate(f"document.querySelector('[name=model]').value = 1; {ASK}")
        second.until("document.querySelector('.state').dataset.kind === 'error'", PATIENCE)
        said = second.evaluate(STATE)
        assert "damaged.gguf cannot be loaded: " in said and said.endswith("What you typed is still here.")
        assert second.evaluate("document.querySelectorAll('.switched').length") == 3
        assert second.evaluate("document.documentElement.scrollWidth") <= 400
        for page in (first, second):
            assert page.told("Runtime.exceptionThrown") == page.told("Log.entryAdded") == []
