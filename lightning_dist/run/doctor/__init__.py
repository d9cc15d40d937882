"""Measure the links, devices and folders of a run's nodes, and find what differs between its ranks.

- ``finding``, ``format``, ``ranks``, ``profile``: What a check has found, the ranks that are examined, and the file of
  figures.
- ``examination``: Runs checks in turn on all ranks, and ends all of them if one fails or hangs.
- ``network``: Reads from the system which links there are.
- ``link_times``, ``links``: Measure collectives and messages, and find slow links.
- ``devices``: Measures products of matrices and memory, and finds slow and used devices.
- ``storage``: Finds folders of checkpoints that ranks do not share, or that are slow or full.
- ``clocks``, ``versions``, ``environment``: Find what differs between ranks, and is too small or dangerous.
- ``checks``: Holds the list of checks.
"""
