"""Hold the list of the checks, in the order in which they run."""

from __future__ import annotations

from lightning_dist.run.doctor import links, storage
from lightning_dist.run.doctor.clocks import check_clocks
from lightning_dist.run.doctor.devices import check_devices
from lightning_dist.run.doctor.environment import check_environment
from lightning_dist.run.doctor.examination import Check
from lightning_dist.run.doctor.network import check_topology
from lightning_dist.run.doctor.versions import check_versions

__all__ = ["CHECKS"]

CHECKS = (
    Check("versions", check_versions),
    Check("environment", check_environment),
    Check("clocks", check_clocks),
    Check("links by name", check_topology),
    Check("links", links.check_links, links.limit_s),
    Check("devices", check_devices),
    Check("the checkpoint folder", storage.check_storage, storage.limit_s),
)
"""A further check is a function, and a line here."""
