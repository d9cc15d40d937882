"""Compare what a dry run predicts with what real ranks need.

- ``cases``: The models and the ways of training.
- ``measured``: Measures the memory of a rank by the events of torch's allocator, without any code of the prediction.
"""
