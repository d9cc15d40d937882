"""Implement Lightning's extension points with the engine: strategies, precision, callbacks and loggers."""

# Lightning is imported first: this registers the strategies, which imports modules of this package, and none of them
# may be half imported then.
import lightning.pytorch  # noqa: F401
