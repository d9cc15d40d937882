"""Compare runs that MLflow holds.

Its modules import neither torch nor Lightning, and each only those above it:

- ``measures``: Says which metrics are compared, and how the history of each becomes a number.
- ``reading``: Reads runs and the histories of their metrics.
- ``target``: Finds when a run reaches a value.
- ``scaling``: Computes how throughput grows with the number of processes.
- ``comparison``: Holds the parameters that differ, and the numbers of each row.
- ``format``, ``curves``, ``colours``: Prepare numbers and histories for what shows them.
- ``table``, ``document``, ``page``, ``picture``: Show a comparison in the terminal, as JSON, HTML and PNG.
- ``command``: Is the command.
"""
