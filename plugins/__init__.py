"""Lightning's extension points, made of the engine: strategies, precision, callbacks, loggers."""
