"""Define the errors that the trace of a step raises, and that are no failures of the step itself."""

from __future__ import annotations

__all__ = [
    "EndOfTraceError",
    "LoopByValueError",
    "NotTraceableError",
    "RefusalError",
    "RepeatedCallsError",
    "TraceError",
    "next_item_refused",
]


class RefusalError(ValueError):
    """Report an error of an observer, which a run on fake tensors passes on because it is not a failure of the step."""


class TraceError(RefusalError):
    """Report that a step cannot be split into stages; the message gives the reason and a remedy."""


class NotTraceableError(TraceError):
    """Report that a step cannot be traced, because it does not run to its end on fake tensors."""


class LoopByValueError(NotTraceableError):
    """Report that a step calls the model in a loop that ends by the value of a tensor, as text generation does."""


class RepeatedCallsError(TraceError):
    """Report that a step calls a block several times."""


class EndOfTraceError(BaseException):
    """End the run of a step on fakes where its observer has seen enough; it is no exception that the step may catch."""


def next_item_refused(name: str) -> str:
    """Return the sentence that refuses a step which takes the next item of the iterator ``name`` under a pipeline."""
    return (
        f"The step takes the next item of {name}, an iterator: under a pipeline, each stage would take one for each"
        " microbatch. Let the loader give the item as a part of the batch, as Lightning's CombinedLoader does, or take"
        " it in on_train_batch_start and keep it as an attribute."
    )
