"""Flax workloads that memplan is tried on: whole models, small enough to read in one sitting.

`models.configs` holds the published shapes, `models.llama` the decoder, `models.scanned` the
same with its layers stacked and scanned, `models.moe` the same with experts; `models.vit`,
`models.dit` and `models.unet` see, denoise and label images. `models.training` is a training
step and `models.sharding` how a mesh splits it. `models.workloads` puts them together, and
`models.corpus` gives the sizes in which memplan is measured.
"""
