"""One script a question; each prints a table. They compile for hardware that is not here and run
nothing on any that is, `on_device` apart."""

import jax

jax.config.update("jax_platforms", "cpu")
