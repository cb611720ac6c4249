"""Which part of a prompt, through which head, made the model say it: answers from interventions, not from shares of a sum.

- A *unit* is a token, word, sentence or given range of the prompt's tokens (:mod:`~kvlens.analyses.attribution.units`).
- A *counterfactual prompt* lacks a unit, or has another in its place (:mod:`kvlens.conversion.counterfactual` says what
  becomes of positions).
- The *baseline* keeps what is always there: BOS, in its place; without BOS the empty prompt. "Without the prompt" means this.
- The *answer* is a token, or several, whose log-probabilities add up; against a *rival*, theirs are taken away.
- *Total effect* of a unit: log p(answer) with minus without it, everything recomputed, in nats.
- *Attention-knockout effect*: the unit's keys and values are hidden from the text alone (softmax renormalizes, linear attention
  loses their terms of b_KV and b_D); the prompt's own pass is unchanged. Under a KV shift the positions that carry the unit's
  shifted keys and values belong to it. What a later token of the prompt copied out of the unit is not taken away: a total
  effect without a knockout effect was rewritten while the prompt was read.
- A head's *swap*: its part of the bias, with its shift state, replaced by that of the counterfactual prompt; the *converse*
  replaces all others.
- The *null*: the same measure for units of unrelated prompts of as many tokens, put where the unit stands.
"""
