"""OpenAI's chat format: requests to prompts, sampled tokens to responses; for the chat server and for agents."""
