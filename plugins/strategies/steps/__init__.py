"""Run the steps of a LightningModule, as Lightning's loops ask for them.

- ``base``: Defines the interface of all kinds of steps.
- ``whole``: Runs steps on the whole module.
- ``pipelined``: Runs steps on the stages of a pipeline, with the following modules:

  - ``microbatching``: Splits a batch into microbatches.
  - ``result``: Merges the results of the microbatches, and gives them to all ranks.
  - ``metrics``: Runs torchmetrics in a step.
  - ``collectives``: Refuses collectives that a step must not call.
  - ``loss_of_microbatches``: Checks that the loss is a mean over samples.
  - ``tracing``: Replaces collectives while a step is traced on tensors without values.

- ``weighting``: Computes the mean of losses that are means over unequal numbers of tokens.
- ``example_step``: Builds the first step of a run for fake tensors, before the module is split.
- ``choice``: Chooses the kind of steps that a module runs.
"""
