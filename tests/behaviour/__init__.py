"""Run cases of ordinary Lightning code under every strategy, and compare each with a run in one process.

A case is a function in ``cases/<area>.py``. It is given a :class:`~tests.behaviour.case.Run`, does what a user would do
with a Trainer, and records the values that must not depend on the strategy::

    @case("EarlyStopping ends at the same epoch")
    def early_stopping(run: Run) -> None:
        run.fit(Classifier(), callbacks=[EarlyStopping("val/loss")], val=True, max_epochs=4)

The same function runs in one process and, on every rank, under each of ``tests.behaviour.case.STRATEGIES``.
``run.fit`` records the whole weights and buffers, every logged metric, the number of steps, and the name, score and
content of the best and last checkpoints; ``run.record`` records further values. On every rank, the recorded values must
equal those of one process. ``run.loader`` gives each data-parallel rank its part of the same global batch.

The outcome of a case under a strategy is one cell of the table in the documentation:

- ``equal``: all recorded values equal those of one process.
- ``refused``: every rank raises an error that matches ``refused={"pp": "regular expression"}`` of the case.
- ``differs``: the case runs and is not compared; the documentation shows the sentence that the case gives as
  ``differs={"pp": "sentence"}``.
- ``wrong``, ``crashed`` or ``hung``: there is a defect.

``python -m tests.behaviour --cases "early*" --strategies full,tp`` runs some of the cases.
"""
