"""Check the links inside of nodes and between them by measuring collectives and messages."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median_high

import torch.distributed as dist

from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.format import bandwidth_text, seconds_text
from lightning_dist.run.doctor.link_times import Scope, measure_collectives, measure_pairs, pairs_of, ring_of
from lightning_dist.run.doctor.network import adapters, interfaces, kinds_of_pairs, own_interface
from lightning_dist.run.doctor.profile import LinkFigures
from lightning_dist.run.doctor.ranks import Ranks

__all__ = ["SLOW_PAIR", "check_links", "judge_pairs", "judge_speed", "limit_s"]

SLOW_PAIR = 0.5
"""A pair is slow if its bandwidth is below this part of what is usual for its scope."""

SLOW_AGAINST_ADAPTER = 0.25
"""Messages between nodes are slow if they have less than this part of the bandwidth of the adapter."""

LARGEST_OF_GLOO = 10e9
"""Bits per second above which gloo, which sends by one thread over one TCP connection, is not expected to come."""

_SCOPES: dict[Scope, str] = {"node": "links inside a node", "between_nodes": "links between nodes"}


def limit_s(examination: Examination) -> float:
    """Return after how many seconds the measurement counts as hanging: 5 for each pair, and 300 for the rest."""
    ranks = examination.ranks
    num_pairs = ranks.world_size**2 if examination.all_pairs else 2 * ranks.world_size
    return 300.0 + 5.0 * num_pairs


def check_links(examination: Examination) -> list[Finding]:
    """Measure collectives and messages inside of nodes and between them."""
    ranks, links = examination.ranks, examination.links
    findings = []
    if ranks.world_size == 1:
        findings.append(
            Finding(
                "links",
                "skip",
                "Links, clocks and folders that several ranks share were not measured, because there is one process.",
                "Give --devices to measure inside this node, or start the command by torchrun on all nodes.",
            )
        )
        return findings
    groups = [_group_of(node, ranks) for node in ranks.of_nodes]
    leaders = [node[0] for node in ranks.of_nodes]
    between = _group_of(leaders, ranks)
    own, node = ranks.of_nodes[ranks.nodes[ranks.rank]], groups[ranks.nodes[ranks.rank]]
    measured = []
    if len(own) > 1:
        measured += measure_collectives(node, own, "node", ranks.device)
        pairs = pairs_of(own) if examination.all_pairs else ring_of(own)
        measured += measure_pairs(pairs, node, ranks.rank, "node", ranks.device)
    if len(leaders) > 1:
        if ranks.rank in leaders:
            measured += measure_collectives(between, leaders, "between_nodes", ranks.device)
        pairs = pairs_of(range(ranks.world_size), ranks.nodes) if examination.all_pairs else ring_of(leaders)
        measured += measure_pairs(pairs, _world(), ranks.rank, "between_nodes", ranks.device)
    # Every rank of a group has the same figures of its collectives.
    links += dict.fromkeys(link for of_rank in ranks.gather(measured) for link in of_rank)
    kinds = kinds_of_pairs(ranks)
    for scope, name in _SCOPES.items():
        of_scope = [link for link in links if link.scope == scope]
        if of_scope:
            findings.append(Finding(name, "pass", _described(of_scope)))
            findings += judge_pairs(of_scope, ranks, kinds)
        elif scope == "between_nodes":
            findings.append(
                Finding(
                    name, "skip", "Links between nodes were not measured, because all ranks are on one node.",
                    "Start the command by torchrun on several nodes to measure them.",
                )
            )  # fmt: skip
    findings += judge_speed(links, ranks, ranks.gather(_adapter_speed(examination.backend)), examination.backend)
    return findings


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _group_of(members: Sequence[int], ranks: Ranks) -> dist.ProcessGroup:
    """Make a process group of some ranks. This is a collective over all ranks."""
    if len(members) == ranks.world_size:
        return _world()
    group: dist.ProcessGroup = dist.new_group(list(members))
    return group  # On ranks outside of it, it is a placeholder that is not used.


def _adapter_speed(backend: str) -> float | None:
    """Return the bits per second of the fastest adapter that the backend can use to other nodes; None: unknown."""
    speeds = []
    if "nccl" in backend:
        speeds += [adapter.bits_per_s for adapter in adapters() if adapter.is_up and adapter.bits_per_s]
    if not speeds:
        chosen = os.environ.get("NCCL_SOCKET_IFNAME" if "nccl" in backend else "GLOO_SOCKET_IFNAME")
        name = chosen or own_interface(os.environ.get("MASTER_ADDR", "localhost"))
        speeds += [port.bits_per_s for port in interfaces() if port.name == name and port.bits_per_s]
    return max(speeds, default=None)


def judge_pairs(
    links: Sequence[LinkFigures], ranks: Ranks, kinds: Mapping[tuple[int, int], str] | None = None
) -> list[Finding]:
    """Find pairs that are slower than the others of the same scope and kind.

    Pairs of GPUs in a node may have different kinds of links, such as NVLink and PCIe, of which each is compared with
    its own. What is usual is the upper median of the bandwidths. A slow rank makes at most half of the pairs slow,
    unless there are three ranks, where it is two of three pairs; then the fastest one is what is usual.

    Args:
        links: Figures of links of one scope.
        ranks: The ranks, and the hosts that they are on.
        kinds: Kinds of the links of pairs, as far as they are known.
    """
    by_kind: dict[str | None, list[LinkFigures]] = defaultdict(list)
    for link in links:
        if link.operation == "point_to_point":
            by_kind[(kinds or {}).get((link.ranks[0], link.ranks[1]))].append(link)
    return [finding for pairs in by_kind.values() for finding in _judge_equal_pairs(pairs, ranks)]


def _judge_equal_pairs(pairs: Sequence[LinkFigures], ranks: Ranks) -> list[Finding]:
    if len(pairs) < 2:
        return []
    speeds = [link.bytes_per_s for link in pairs]
    usual = max(speeds) if len(pairs) <= 3 else median_high(speeds)
    slow = sorted((link for link in pairs if link.bytes_per_s < SLOW_PAIR * usual), key=lambda link: link.bytes_per_s)
    if not slow:
        return []
    shown = ", ".join(
        f"{link.ranks[0]}-{link.ranks[1]} {bandwidth_text(link.bytes_per_s)}" for link in slow[:_MAX_SHOWN]
    )
    more = f" and {len(slow) - _MAX_SHOWN} more" if len(slow) > _MAX_SHOWN else ""
    common = set(slow[0].ranks).intersection(*(link.ranks for link in slow))
    culprits = [rank for rank in common if all(link in slow for link in pairs if rank in link.ranks)]
    if len(culprits) == 1:
        who = f" They are all pairs of {ranks.named(culprits)}, so that this rank's side of the link is the slow one."
    else:
        who = f" The pairs are on {', '.join(ranks.named(link.ranks) for link in slow[:_MAX_SHOWN])}."
    return [
        Finding(
            f"slow {_SCOPES[slow[0].scope].removeprefix('links ')}",
            "warn",
            f"The pairs {shown}{more} have less than half of the {bandwidth_text(usual)} that is usual here, and every"
            f" collective waits for the slowest link.{who}",
            "Look at the cable, the adapter's speed (`ethtool`, `ibstat`, `nvidia-smi topo -m`) and other traffic of"
            " that node, or leave the node out."
            + ("" if len(culprits) == 1 else " --pairs measures every pair, which shows whose link it is."),
        )
    ]


_MAX_SHOWN = 4


def judge_speed(
    links: Sequence[LinkFigures], ranks: Ranks, speeds: Sequence[float | None], backend: str
) -> list[Finding]:
    """Compare the messages between nodes with the speed that their adapters are said to have.

    Args:
        links: Figures of all links.
        ranks: The ranks, and the hosts that they are on.
        speeds: For each rank, the bits per second of its adapter; None: unknown.
        backend: Backend of the process group.
    """
    slow = []
    for link in links:
        known = [speed for rank in link.ranks if (speed := speeds[rank]) is not None]
        if link.scope != "between_nodes" or link.operation != "point_to_point" or not known:
            continue
        bits = min(known) if "nccl" in backend else min(*known, LARGEST_OF_GLOO)
        if 8 * link.bytes_per_s < SLOW_AGAINST_ADAPTER * bits:
            slow.append((8 * link.bytes_per_s / bits, min(known), link))
    if not slow:
        return []
    part, bits, link = min(slow, key=lambda entry: entry[0])
    return [
        Finding(
            "speed of adapters",
            "warn",
            f"Pairs with less than a quarter of the bandwidth to be expected of their adapters: {len(slow)}. The"
            f" slowest is {link.ranks[0]}-{link.ranks[1]} on {ranks.named(link.ranks)}:"
            f" {bandwidth_text(link.bytes_per_s)}, {100 * part:.1f}% of what can be expected of an adapter with"
            f" {bits / 1e9:g} Gbit/s.",
            "Check which interface is used (NCCL_DEBUG=INFO shows it; NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and"
            " NCCL_IB_HCA choose it), and whether a switch, a container network or other traffic limits it. If the link"
            " is meant to be this slow, `compression` or `sync` of hybrid_shard send less over it.",
        )
    ]


def _described(links: Sequence[LinkFigures]) -> str:
    """Return the slowest latency and bandwidth of each operation, with the fastest one if there are several."""
    parts = []
    for operation in dict.fromkeys(link.operation for link in links):
        of_operation = [link for link in links if link.operation == operation]
        slowest = min(of_operation, key=lambda link: link.bytes_per_s)
        fastest = max(of_operation, key=lambda link: link.bytes_per_s)
        latency = max(link.alpha_s for link in of_operation)
        text = f"{operation} {seconds_text(latency)}, {bandwidth_text(slowest.bytes_per_s)}"
        if len(of_operation) > 1:
            text += f" to {bandwidth_text(fastest.bytes_per_s)} in {len(of_operation)} groups or pairs"
        parts.append(text)
    return "Latency and bandwidth are: " + "; ".join(parts) + "."
