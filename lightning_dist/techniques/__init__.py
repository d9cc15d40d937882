"""Hold the techniques, each of which changes how a module runs, and their protocol."""
