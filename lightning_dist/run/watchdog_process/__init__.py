"""Watch the ranks of a node in a separate process, which reports the rank that hangs and why, and ends all of them.

:class:`lightning_dist.run.watchdog.Watchdog` starts the process. It uses the standard library alone, so that it starts
quickly and does not hang for the reason that the ranks do. Ranks connect to its socket, and each passes two in-memory
files: one with the time of its last beat, one for its stacks. Messages are lines of JSON. The process detects a rank's
end by its pidfd, which never refers to another process, as a reused process id would.
"""

__all__ = ["JOIN_S"]

JOIN_S = 60.0
"""Seconds that a rank waits for the watchdog process, and that the process waits for the first rank."""
