"""Run the steps of a LightningModule, as Lightning's loops ask for them.

- ``whole``: steps that run on the whole module.
- ``pipelined``: steps that run on the stages of a pipeline, with ``microbatching`` (how a batch is split), ``result``
  (what a step leaves on all ranks), ``metrics`` (torchmetrics in a step), ``collectives`` (which a step may call),
  ``loss_of_microbatches`` (a check of the loss), and ``tracing`` (a step on tensors without values).
- ``base``: what both have, and ``weighting``: losses that are means over unequal numbers of tokens.
- ``example_step``: the first step of a run, on tensors without values.
"""
