"""What has another name since kvlens 0.1.0. The old names are gone; files written under them (biases, models, runs, batches) load.

Code:

| old | new |
|---|---|
| package `analyses` | `kvlens.analyses` (`analyses` stays as a short name) |
| `analyses.dual.generalisation` | `kvlens.analyses.dual.generalization` |
| `SoftmaxOptions(method="landmark", ...)` | one class a method: `kvlens.conversion.Landmark`, `kvlens.conversion.RandomProjections`, `kvlens.conversion.Taylor`, `kvlens.conversion.Learned`, `kvlens.conversion.Exact` |
| options `n_features`, `fit` of the method landmark | `n_keys`, `fitted` of `kvlens.conversion.Landmark` (the old ones stay as shorthand in `kvlens.convert_prompt`) |
| `build_report(conversion=...)` | `kvlens.report.build_report(method=...)` |
| `BiasFit.output_error` | `kvlens.kv_bias.BiasFit.head_output_error` |
| `with model.softmax_form("fused")` | `kvlens.HookedKVTransformer.using_softmax_form("fused")` |
| `model.generate(softmax_form=...)` | a block of `kvlens.HookedKVTransformer.using_softmax_form` around it |
| `DualModel.minimise` | `kvlens.dual.DualModel.minimize` |
| `viz.coloured_tokens` | `kvlens.viz.colored_tokens` |
| `LinkedShares.colourings`, `linked_shares(colourings=...)` | `kvlens.analyses.LinkedShares.colorings`, `linked_shares(colorings=...)` |
| `kv_shift(boundary=...)`, `naive_kv_shift(boundary=...)` | `kvlens.ops.kv_shift.kv_shift(state=...)`, `naive_kv_shift(state=...)` |
| `KVBias.combine(boundary=...)` | `kvlens.KVBias.combine(shift_state=...)` |
| `ops.feature_maps.FEATURE_MAPS`, `ops.feature_maps.feature_dim(name, ...)` | `kvlens.components.FEATURE_MAPS`, and `d_phi` of each |
| `KeysBeside`, `attend_beside`, `fused_beside` of `ops.softmax_attention` | `ExtraKeys`, `attend_with_extra_keys`, `merge_extra_keys` |
| `experiments.shared.judge` (`Judge`, `JUDGE`) | `kvlens.experiments.shared.significance` (`SignificanceTest`, `SIGNIFICANCE`) |
| `experiments.kvsa.llama` | `kvlens.experiments.kvsa.models` |
| `tasks.facts.judged_questions`, `Judged` | `kvlens.tasks.facts.scored_questions`, `kvlens.tasks.facts.ScoredQuestions` |
| `tasks.first_repeat.FirstRepeats.judged` | `kvlens.tasks.first_repeat.FirstRepeats.scored` |
| `experiments.shared.outcome.Comparison.judged` | `kvlens.experiments.shared.outcome.Comparison.tested` |
| `attention_view(places=...)` | `kvlens.viz.attention_view(positions=...)` |
| `analyses.inputs.WRONG` | `kvlens.analyses.RIVAL` |

British spelling has become American, in messages and documentation too: normaliser, normalizer. Values that files hold keep
theirs, such as the attention variant `regularised`.

Arguments of analyses. Each takes `prompt` and `text`, a string or tokens; `prompt` may be a `kvlens.KVBias` where the analysis
does not read the prompt's own tokens:

| analysis | old | new |
|---|---|---|
| all | `prompt_tokens`, `text_tokens` | `prompt`, `text` |
| `prompt_effect`, `prompt_by_depth` | `baseline_tokens` | `baseline` |
| `circuits`, `bias_overwriting`, `bias_addition` | `first_tokens`, `second_tokens` | `prompt`, `second_prompt` |
| `activation_patching` | `clean`, `text_tokens` | `prompt`, `text` |
| `bias_decomposition` | `bias=` | `prompt` |
| `bias_singular_values` | `(bias)` | `(model, prompt)` |
| `layer_contributions` | `(model, text_tokens, bias=..., before_tokens=...)` | `(model, prompt, text)`: a bias is attached, a string or tokens stand in front of the text, None is neither |
| `induction_heads` | `tokens` | `prompt` |
| `induction_heads` | `threshold`, `ratio` | of `kvlens.analyses.induction_verdicts` |
| `attention_rows` | `tokens` | `prompt` |
| `bias_positions` on the command line | `--places` | `--at` |
| `bias_decomposition`, `bias_positions`, `bias_effects`, `activation_patching`, `layer_contributions` and their records | `wrong` | `rival` |

Columns of tables. `position` is where the text is read or predicted, `prompt_position` what is read there:

| table | old | new |
|---|---|---|
| `bias_effects`, `bias_positions`, `activation_patching` | the value `boundary` of `part` and `point` | `shift_state` |
| `bias_positions` | `text_position` | `position` |
| `dual_losses` | `query` | `position` |
| `dual_demonstrations` | `query`, `position` | `position`, `prompt_position` |
| `prompt_copies` | `query`, counted through prompt and text | `position`, counted from the beginning of the text |
| `prompt_copies` | `key`, `share` | `prompt_position`, `attention` |
| `induction_heads` | `prefix_matching_score`, `previous_token_score_value` ... | one row for each `kind`, with the columns `score`, `score_value`, `score_key`, `contrast`, `loss_change` |
| `prompt_attribution` | `text`, `share` | `unit_text`, `total_share` |
| `attribution_by_head`, `attribution_by_position` | `text` | `unit_text` |
| `attribution_by_head` | a head's `swap` with its shift state; `head` -1 for a convolution | rows of their own, told apart by `part`: `head`, `shift_state`, `convolution` |
| `attribution_by_head` | `p_value`, `significant`, `p_value_alone`, `leads` (`null=`, `n_null`, `n_tested=`) | none: `kvlens explain` names heads by what was run; `prompt_attribution` keeps its p-values |
| `answer_flow` | `removed`, `unit`, `position` | `heads`, `positions`, `inside`, `others`: subsets of the parts drawn |
| `explain` | `Explained.unit`, `needed()`, `sufficient()`, `unstable_lead()`, `testable`; `explain(quick=, method=)` | `Explained.cause`, `statements`, `sets(about, role)`, `searched`; `heads` and `positions` hold what was run of single ones |
| `layer_contributions`, `bias_decomposition`, `bias_positions`, `induction_verdicts` | `logit`, `logit_attribution` of the raw logit | the same columns, of the logit less its mean over the vocabulary where no rival is given |
| `induction_heads` | `verdict`, `role`, `copying_score` and every other number of the head as a whole | the same columns of `kvlens.analyses.induction_verdicts` |
"""  # noqa: E501
