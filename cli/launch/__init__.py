"""Start the processes of a run, on this node, on several nodes, or as a job of a scheduler."""
