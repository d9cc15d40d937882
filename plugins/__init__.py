"""Implement Lightning's extension points with the engine: strategies, precision, callbacks and loggers."""

# Its import registers the strategies, which imports modules of this package; so none may be half imported by then.
import lightning.pytorch  # noqa: F401
