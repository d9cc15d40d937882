"""Start a cluster of SLURM on this machine: a controller, and the daemons of two nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.launchers.training import until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "unshare")
"""What the cluster needs; in Debian, it is in the packages slurm-wlm and munge."""

NODES = ("slurm1", "slurm2")

_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
SchedulerParameters=batch_sched_delay=1,sched_interval=2
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
{nodes}
PartitionName=low Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Return the programs that the cluster needs and this machine does not have."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Run a cluster of two nodes, which this process's environment names to the commands of SLURM.

    The partition ``high`` preempts jobs of the partition ``low``. Both nodes are this machine, under two names that
    only the daemons and their jobs can resolve.

    Args:
        folder: Empty folder for the state of the cluster.
    """
    (folder / "state").mkdir(parents=True)
    ports = [_free_port() for _ in range(1 + len(NODES))]
    num_cores = os.cpu_count() or 1
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={num_cores}"
        for name, port in zip(NODES, ports[1:], strict=True)
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            host=socket.gethostname(), port=ports[0], folder=folder, nodes=nodes, names=",".join(NODES)
        )
    )
    hosts = folder / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {name}\n" for name in NODES))
    os.environ["SLURM_CONF"] = str(configuration)
    munge = _start_munge()
    in_namespace = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    log = (folder / "daemons.log").open("w")
    daemons = [subprocess.Popen(["slurmctld", "-D"], stderr=log)]
    try:
        daemons += [subprocess.Popen([*in_namespace, "slurmd", "-D", "-N", name], stderr=log) for name in NODES]
        until(lambda: output("sinfo", "--noheader", "--format=%D %t", "--partition=low") == "2 idle", 30.0)
        yield
    finally:
        subprocess.run(["scancel", "--signal=KILL", "--full", "--user=root"], check=False)
        time.sleep(1.0)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30.0)
        if munge is not None:
            munge.terminate()
            munge.wait(10.0)
        log.close()
        del os.environ["SLURM_CONF"]


def output(*words: str) -> str:
    """Return what a command prints, without the space around it."""
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def state_of(job: str) -> str:
    """Return the state of a job, such as ``RUNNING``."""
    shown = output("scontrol", "show", "job", job)
    return shown.partition("JobState=")[2].partition(" ")[0]


def _start_munge() -> subprocess.Popen[bytes] | None:
    """Start the daemon that signs the messages of SLURM, unless it runs."""
    if output("munge", "--no-input"):
        return None
    os.makedirs("/run/munge", exist_ok=True)
    shutil.chown("/run/munge", "munge")
    daemon = subprocess.Popen(["munged", "--foreground"], user="munge")
    until(lambda: bool(output("munge", "--no-input")), 10.0)
    return daemon


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
