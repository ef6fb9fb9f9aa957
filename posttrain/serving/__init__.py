"""`posttrain serve`: a model over HTTP, in the chat-completions dialect of OpenAI's clients.

Requests are read (`chat_bodies`), become prompts (`chat_prompts`), are answered by the serving loop of
`rl_core.inference` (`answering`), and go back as JSON or a stream (`chat_routes`, `chat_answers`).
"""
