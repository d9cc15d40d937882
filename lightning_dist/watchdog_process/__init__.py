"""The process that watches the ranks of a node: it finds the one that hangs, says why, and ends them all.

Started by :class:`lightning_dist.watchdog.Watchdog`, with the standard library alone: it runs at once, and what makes
the ranks hang does not make it hang. Ranks connect to its socket; each hands over two files in memory: the time of its
last beat, and its stacks. They talk in lines of JSON. A rank's end is seen by its pidfd, which, unlike its number, is
never another process's.
"""

__all__ = ["JOIN_S"]

JOIN_S = 60.0
"""How long the first rank waits for the process, and the process for the other ranks."""
