"""Compare what a dry run predicts with what real ranks need.

- ``cases``: The models and the ways of training.
- ``measured``: Measures the memory of a rank without any code of the prediction.
- ``__main__``: Compares all cases, and writes the table of the documentation.
"""
