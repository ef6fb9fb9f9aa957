"""Server of one model over HTTP (`posttrain serve`), in the chat-completions format of OpenAI's clients.

A request is parsed (`request_bodies`), rendered as a prompt (`chat_prompts`), answered by the serving loop of
`rl_core.inference` (`served_model`), and returned as JSON or as a stream (`chat_routes`, `chat_responses`).
"""
