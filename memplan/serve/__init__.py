"""A server of language models over `memplan.kv`, with OpenAI's interface."""
