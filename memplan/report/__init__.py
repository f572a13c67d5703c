"""What memplan shows of a program: one value (`Report`), three ways to see it.

Module, Plan, Machine ─ build ─► Report ─┬─ html    one self-contained page
                                         ├─ trace   opens in Perfetto
                                         └─ sections  tables on a terminal, or plain text in a pipe
"""
