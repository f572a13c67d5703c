"""The module that XLA scheduled, in the form in which it is planned; it computes the same."""
