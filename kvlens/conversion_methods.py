"""The conversion methods of softmax models by name, and where each is. Nothing is imported to know it, so that help is quick.

A line here makes ``convert_prompt(..., method="name")`` and ``kvlens report --method name`` find a method.
:data:`kvlens.conversion.METHODS` has the classes.
"""

CONVERSION_METHODS = {
    "exact": "kvlens.conversion.softmax.method:Exact",
    "landmark": "kvlens.conversion.softmax.landmark:Landmark",
    "attention_matching": "kvlens.conversion.softmax.attention_matching:AttentionMatching",
    "streaming_llm": "kvlens.conversion.softmax.kept_keys:StreamingLLM",
    "h2o": "kvlens.conversion.softmax.kept_keys:H2O",
    "snapkv": "kvlens.conversion.softmax.kept_keys:SnapKV",
    "expected_attention": "kvlens.conversion.softmax.expected_attention:ExpectedAttention",
    "kvzip": "kvlens.conversion.softmax.kvzip:KVzip",
    "random": "kvlens.conversion.softmax.free_features:RandomProjections",
    "taylor": "kvlens.conversion.softmax.free_features:Taylor",
    "elu_plus_one": "kvlens.conversion.softmax.free_features:EluPlusOne",
    "learned": "kvlens.conversion.softmax.free_features:Learned",
}
"""name -> MODULE:CLASS."""
