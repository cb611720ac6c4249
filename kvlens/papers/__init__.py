"""The papers that kvlens implements: for each, the function for every equation, and misprints.

| page | paper |
|---|---|
| `kvlens.papers.iclca` | Chen, Hu, Jin, Lee, Kawaguchi 2024, *Exact Conversion of In-Context Learning to Model Weights in Linearized-Attention Transformers* (ICLCA), and the same authors' slides, *Duality Between Prompting and Weight Update in Transformers* |
| `kvlens.papers.kvsa` | Xu, Cheng, Wang, Chen 2024, *KV Shifting Attention Enhances Language Modeling* (KVSA) |
| `kvlens.papers.dual` | Ren, Liu 2024, *Towards Understanding How Transformers Learn In-context Through a Representation Learning Lens* (DUAL) |
| `kvlens.papers.lecture` | Vitercik 2024, MS&E 236 Lecture 16, *Transformers* (LECTURE) |

Two conventions hold on all pages. **Positions start at 0** here and at 1 in the papers. **Vectors are rows**, as in
TransformerLens: $q = x W_Q + b_Q$. Formulas are for a single head.
"""  # noqa: E501
