"""axe-core, run over the pages in Chromium: no moderate or serious finding in the report, nor in any single picture.

axe-core is an npm package; the environment variable KVLENS_AXE tells where its axe.min.js is, else it is looked for where
`.ci/run` puts it.
"""

import html
import json
import os
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from headless_chromium import CHROMIUM, WITHOUT, visit

from kvlens import HookedKVTransformer
from kvlens.report import build_report, example_for
from kvlens.report.page import build_page
from kvlens.viz import Page, colored_tokens, contribution_bars, head_heatmap

AXE = Path(os.environ.get("KVLENS_AXE", Path(__file__).parents[2] / ".axe/node_modules/axe-core/axe.min.js"))
RUN = """;axe.run(document, {resultTypes: ["violations"]}).then((result) => {
  const found = document.createElement("pre");
  found.id = "axe-result";
  const where = (v) => v.nodes.map((n) => n.target.join(" ")).slice(0, 3);
  found.textContent = JSON.stringify(result.violations.map((v) => [v.id, v.impact, where(v)]));
  document.body.append(found);
});"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT),
    pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: npm install --prefix .axe axe-core, or set KVLENS_AXE"),
]


def findings(page: str, folder: Path) -> list:
    """What axe-core reports as moderate, serious or critical in ``page`` after its scripts ran."""
    seen = visit(page, folder, script=AXE.read_text(encoding="utf-8") + RUN)
    found = re.search(r'<pre id="axe-result">(.*?)</pre>', seen.dom, flags=re.DOTALL)
    assert found, "axe-core gave no result"
    return [entry for entry in json.loads(html.unescape(found[1])) if entry[1] in ("moderate", "serious", "critical")]


def test_the_checker_sees_what_is_wrong(tmp_path):
    """A button without a name and gray on gray are findings: the checker must report them."""
    page = Page("bad").section("x", "y").add(colored_tokens(["a"], [1.0]))
    bad = page.to_html().replace("</main>", '<button></button><p style="color:#aaa;background:#bbb">gray</p></main>')
    assert {entry[0] for entry in findings(bad, tmp_path)} >= {"button-name", "color-contrast"}


def test_the_report_has_no_finding(tmp_path):
    """Of a model that has every figure, the explanation included."""
    model, example = HookedKVTransformer.from_zoo("facts-linear"), example_for("facts-linear")
    report = build_report(model, *example, model_name="facts-linear", new_tokens=3, dual=True)
    assert report.explained is not None
    assert findings(build_page(report).to_html(), tmp_path) == []


def test_pictures_at_full_strength_have_no_finding(tmp_path):
    table = pd.DataFrame({"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "x": [1.0, -1.0, 0.5, -0.5]})
    strengths = torch.linspace(-1.2, 1.2, 25).tolist()
    page = Page("pictures").add(head_heatmap(table, "x")).add(contribution_bars(table, "x", part="head"))
    page.add(colored_tokens([f"t{i} " for i in range(25)], strengths, top=1.0))
    assert findings(page.to_html(), tmp_path) == []
