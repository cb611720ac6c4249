"""Figures of a converted prompt, for notebooks, papers and web pages that work offline.

Every function draws the result of an analysis, a table or tensors, and runs no model; only `attention_view_under_bias` and
`circuit_view` do. It returns a `Piece`, which is shown inline in a notebook; ``save_html`` writes it as one self-contained
file; ``save_png`` and ``save_svg`` write a static figure if there is one. A `Page` combines several in one file. Functions with
a static figure can also draw into matplotlib axes, given as ``ax=`` (``axes=`` for several), and then return these axes.

    from kvlens.analyses import bias_by_head, head_details
    head_heatmap(bias_by_head(model, prompt, text), "ablation_kl", details=head_details(model, prompt, text))

    figure, ax = plt.subplots()
    head_heatmap(bias_by_head(model, prompt, text), "ablation_kl", ax=ax)
"""

from kvlens.viz.attention import attention_view, attention_view_under_bias, induction_arcs, linked_view
from kvlens.viz.circuits import circuit_view
from kvlens.viz.heads import dual_view, head_heatmap
from kvlens.viz.page import Page, Piece
from kvlens.viz.tables import contribution_bars, error_table
from kvlens.viz.tokens import colored_tokens, depth_map

__all__ = [
    "Page",
    "Piece",
    "attention_view",
    "attention_view_under_bias",
    "circuit_view",
    "colored_tokens",
    "contribution_bars",
    "depth_map",
    "dual_view",
    "error_table",
    "head_heatmap",
    "induction_arcs",
    "linked_view",
]
