"""Reading and validation of records, tokenisation of conversations, batching, splitting."""
