"""Circuits: of all that a model's parts write and read, the edges that carry the difference between two prompts.

*Nodes* are the embedding, every head, every MLP and the logits. A node writes to the residual stream, and a later one reads the
sum of all that was written before it: a head thrice, through queries, keys and values (the heads of a key-value group share the
latter two, unless each is asked to read its own, *by query head*), an MLP and the logits once. An *edge* is a writer and one of
these inputs. Norms belong to the reader: it is its input in the residual stream, before its norm, that an edge changes. A node
writes what it adds to the stream. With a norm behind heads (Gemma 2 and 3, OLMo 2), that is a head's part of the norm's output,
divided by what the norm divides by in this very run, a circuit's run too; gradients follow it. There a head changes what the
others of its layer write, if only by that scale, even one that leads nowhere. Biases behind heads (b_O) belong to no node.

*Runs.* In a circuit a reader sees, of every writer whose edge is kept, what that writes in the circuit, and of every other what
it wrote on the corrupted prompt:

    x_r = sum_{w kept} y_w + sum_{w cut} y'_w + biases

Layers are recomputed in order, so all edges kept is the clean pass, none the corrupted one. A circuit of nodes keeps all edges
out of them.

*Without a part.* Instead of another prompt, the corrupted run may be that of the same tokens in which nobody reads some of
them: their keys and values are hidden, and the others keep their positions. The two runs then differ in what heads read, not
in the embedding. A hidden token is there for the readers of keys whose edge from the embedding is kept, and for no other: all
edges kept is the clean pass, and none that corrupted run. What hidden tokens write is what they write there. The estimate of
such an edge is the derivative by how far they are there, from 0 (z of a head as if they were hidden) to 1 (as if they were
not); EAP-IG's path leads from 0 to 1 for all heads at once.

*Prompt and text.* Prompts may have a text behind them, the same for clean and corrupted, and an answer of several tokens, which
the model reads one behind the other. An edge carries a difference at the prompt's tokens, which keys and values leave to the
text, as they do in the prompt's bias, and at the text's own. Cut at the prompt's tokens alone, an edge between heads is a path
patched there, with all other heads and MLPs held (Wang et al. 2022, arXiv 2211.00593, app. B; Goldowsky-Dill et al. 2023, arXiv
2304.05969). The prompt's own tokens read what is cut, too: where they do not, it is a part of the bias that is exchanged
(:func:`kvlens.analyses.attribution.by_part.attribution_by_head`).

*Estimates.* How much the metric falls when the edge alone is cut, to first order: (y_w - y'_w) . g_r, with g_r the gradient of
the metric at the reader's input, summed over positions, and the mean over pairs. EAP takes the gradient at the clean prompt,
EAP-IG the mean of those at z' + k / steps (z - z'), k = 1 .. steps, where z and z' are the embeddings of the two prompts. With
*activations*, the path leads from what the writers of one stage (the embedding, a layer's heads, an MLP) wrote on the corrupted
prompt to what they write on the clean one, for the edges out of that stage alone; all else is the clean pass. A
node's estimate is the sum over its edges, which is that of its output: the gradient there is the sum of its readers'. An edge
that hurts has a negative one. What it is in a run with the edge alone cut is its *metric_fall*.

*Faithfulness.* f(k) = (m(circuit) - m(corrupted)) / (m(clean) - m(corrupted)), m the mean of the metric over pairs and k the
share of edges (or nodes) in the circuit; CPR is the area under f, CMD that under |1 - f|, by trapezoids between the shares. The
edges are the largest by value for the one, and by size for the other.

Source: EAP (Syed et al. 2023, arXiv 2310.10348), EAP-IG and the circuits' form (Hanna et al. 2024, arXiv 2403.17806, sec. 2 and
3), CPR and CMD (Mueller et al. 2025, MIB, arXiv 2504.13181, sec. 3). What differs from EAP-IG's code: the sign, since theirs is
of a loss, and that keys and values have an input for each key-value head, not for each query head, unless that is asked for.
"""
