"""Examine the nodes of a run before it starts.

- ``reachability``: Checks that MLflow answers, and says what is not measured.
- ``table``: Prints the findings.
- ``ranks``: Starts or joins the ranks, and runs the checks on them.
- ``command``: Parses the arguments, and prints the result.
"""
