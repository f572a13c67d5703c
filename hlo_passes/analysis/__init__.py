"""Facts of one module, each by itself: who runs what, which values share bytes, what moves."""
