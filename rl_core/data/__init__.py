"""Reading and validating records, tokenising conversations, batching and splitting."""
