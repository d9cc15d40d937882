"""Implement Lightning's extension points with the engine: strategies, precision, callbacks and loggers."""
