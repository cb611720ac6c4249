"""The documentation site: `sphinx-build -E -W --keep-going -d build/doctrees -c docs . build/site`; open build/site/index.html.

The source folder is the repository, so that notebooks, results and the guide are pages where they stand. -E: the search index
of a second build would lack the index entries of pages that did not change.
"""

import ast
import sys
from pathlib import Path

import sphinx.pycode.parser

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import docstrings  # noqa: E402
import reference_pages  # noqa: E402

import kvlens  # noqa: E402

project, author, copyright = "kvlens", "the kvlens authors", "the kvlens authors"
version = release = kvlens.__version__
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    "notebooks/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "tests/benchmarks/results/*.md",
    "kvlens/papers/**.md",
]
exclude_patterns = [".*", "build", "dist"]
extensions = ["myst_nb", "sphinx.ext.autodoc"]

# Sphinx' own fails at the decorator of three of our files, where a dict is unpacked into its arguments
sphinx.pycode.parser.ast_unparse = lambda node, code="": ast.unparse(node)

nitpicky = True
nitpick_ignore_regex = [("py:class", r".*\.[A-Z]|.*\._\w+")]  # type variables, and bases without a page
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries = False

nb_execution_mode = "off"
nb_output_stderr = "remove"
myst_enable_extensions = ["dollarmath", "fieldlist", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_words_per_minute = 200

html_theme = "furo"
html_title = "kvlens"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_use_index = False  # the search finds names sooner
html_domain_indices = False
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False


def setup(app):
    """Connect what stands in the two files beside this one."""
    app.add_directive("markdown", docstrings.Markdown)
    inline, block = docstrings.math_renderers()
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    app.connect("config-inited", lambda app, config: reference_pages.write(Path(app.srcdir) / "docs" / "reference" / "api"))
    app.connect("source-read", reference_pages.fill)
    app.connect("autodoc-process-docstring", docstrings.process_docstring)
    app.connect("autodoc-process-signature", docstrings.process_signature)
    app.connect("doctree-read", docstrings.drop_foreign_types)
    app.connect("missing-reference", docstrings.missing_reference)
    app.connect("html-page-context", reference_pages.shorten)
    app.connect("build-finished", reference_pages.finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
