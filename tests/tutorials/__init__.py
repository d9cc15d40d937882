"""Run the tutorials of the documentation as a reader would (``python -m tests.tutorials``)."""
