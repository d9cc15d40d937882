"""Ordinary Lightning code under every strategy, each case compared with one process.

A case is a function in ``cases/<area>.py``. It gets a :class:`~tests.behaviour.case.Run`, does what a user would do
with a Trainer, and records what must come out the same::

    @case("EarlyStopping ends at the same epoch")
    def early_stopping(run: Run) -> None:
        run.fit(Classifier(), callbacks=[EarlyStopping("val/loss")], val=True, max_epochs=4)

The same function runs in one process and, on every rank, under each of ``tests.behaviour.case.STRATEGIES``.
``run.fit`` records the whole weights and buffers, every logged metric, the number of steps, and the name, score and
content of the best and last checkpoints. ``run.record`` adds more. Everything that is recorded must equal what one
process records, on every rank. ``run.loader`` gives each data-parallel rank its part of the same global batch.

A cell of the table (a case under a strategy) is ``equal``; ``refused``, with an error that the case announces as
``refused={"pp": "regular expression"}``; ``differs``, which the case announces as ``differs={"pp": "sentence"}`` (it
runs, and the documentation says what is different); or a defect: ``wrong``, ``crashed``, ``hung``.

Run some of them: ``python -m tests.behaviour --cases "early*" --strategies full,tp``
"""
