"""Check the project on a machine with GPUs, in the order of what each check tells, within a number of minutes.

``python -m tests.gpu`` needs torch and Lightning, and nothing else. The modules, from the bottom up:

- ``machine``: Describes the devices and the installed packages.
- ``check``: Defines what a check is, and what it needs.
- ``ranks``: Runs functions on ranks, in processes that a check shares with others or has to itself.
- ``checks/``: Holds the checks, a module for each section, and their table.
- ``results``: Keeps what checks have found in a file, so that a later call continues.
- ``page``: Writes this as a page.
- ``kit``: Runs the checks one after another.
"""
