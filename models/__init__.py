"""Flax workloads that memplan is tried on: whole models, small enough to read in one sitting.

`models.configs` holds the published shapes, `models.llama` the decoder, `models.scanned` the
same with its layers stacked and scanned, `models.training` a training step and
`models.sharding` how a mesh splits them. `models.workloads` puts them together.
"""
