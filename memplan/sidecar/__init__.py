"""What a compiled step will do with each buffer and page, for runtimes beside it to read.

    compiled, or a scheduled module ─ building ─► Intents ◄─ forms ─► bytes, JSON, text

`Intents` and its forms need no jax: a runtime that has none reads them.
"""
