"""The conversion methods of softmax models by name, and where each is. Nothing is imported to know it, so that help is quick.

A line here makes ``convert_prompt(..., method="name")`` find a method. :data:`kvlens.conversion.METHODS` has the classes.
"""

CONVERSION_METHODS = {
    "exact": "kvlens.conversion.method:Exact",
    "landmark": "kvlens.conversion.few_keys:Landmark",
    "attention_matching": "kvlens.conversion.few_keys:AttentionMatching",
    "streaming_llm": "kvlens.conversion.kept_keys:StreamingLLM",
    "h2o": "kvlens.conversion.kept_keys:H2O",
    "snapkv": "kvlens.conversion.kept_keys:SnapKV",
    "expected_attention": "kvlens.conversion.kept_keys:ExpectedAttention",
    "kvzip": "kvlens.conversion.kept_keys:KVzip",
    "random": "kvlens.conversion.features:RandomProjections",
    "taylor": "kvlens.conversion.features:TaylorPolynomial",
    "elu_plus_one": "kvlens.conversion.features:EluKernel",
    "learned": "kvlens.conversion.features:Learned",
}
"""name -> MODULE:CLASS."""
