"""Which unit of a prompt, through which head, made the model say it: answers from interventions, not from shares of a sum.

- A *unit* is a part of the prompt, from a message down to a token, or a given string or range of tokens (:mod:`kvlens.units`).
- A *counterfactual prompt* lacks a unit, or has something else in its place (:mod:`kvlens.conversion.prompt` says what
  happens to positions).
- The *baseline* keeps what is always there: BOS, in place; without BOS the empty prompt. "Without the prompt" means it.
- The *answer* is one token or several, whose log-probabilities add up; against a *rival*, the rival's are subtracted.
- *Total effect* of a unit: log p(answer) with minus without it, everything recomputed, in nats.
- *Attention-knockout effect*: the unit is knocked out: the text does not read it (softmax renormalizes, linear attention loses
  the unit's terms of b_KV and b_D); the prompt's own pass is unchanged. Under a KV shift the next positions of the prompt,
  which carry the unit's shifted keys and values, are knocked out with it. Where they would be the text's own, only the unit's
  share is dropped: its rows of the shift state are zero, as at the beginning of a text. What a later token of the prompt copied
  from the unit stays: a total effect without a knockout effect was rewritten while the prompt was read.
- A head's *swap*: its part of the bias, with its shift state, replaced by that of the counterfactual prompt; the *converse*
  replaces all others.
- The *null*: the same measure for units of unrelated prompts with as many tokens, put where the unit stands.
"""
