"""Models: causal language models, reward heads, selective log-probabilities, adapters."""
