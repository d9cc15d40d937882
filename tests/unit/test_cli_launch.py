"""The command that launches runs starts ranks, keeps their output, restarts them, and refuses wrong arguments."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_dist.cli.launch import rank
from lightning_dist.cli.launch.failure import Failure, first_error
from lightning_dist.cli.launch.job import Job, value_of
from lightning_dist.cli.launch.slurm import script
from tests.command import run_command

_SCRIPT_OF_SLURM = """\
#!/bin/bash
#SBATCH --job-name=lightning-dist-fit
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --signal=SIGUSR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/runs/a/slurm_%j.out
#SBATCH --partition=gpu
#SBATCH --exclusive

restarts=${SLURM_RESTART_COUNT:-0}
logs=/runs/a/$SLURM_JOB_ID/attempt_$restarts
export LIGHTNING_DIST_LAUNCH_LOGS=$logs PYTHONUNBUFFERED=1
mkdir -p "$logs"

srun --kill-on-bad-exit=1 --output="$logs/rank_%t.out" --error="$logs/rank_%t.err" \\
    /venv/bin/python -m lightning_dist.cli.launch.rank fit --ckpt_path=auto -c 'my run.yaml' \
--trainer.devices=8 --trainer.num_nodes=2
code=$?
# The code of srun may be that of a rank which srun has ended after another one had failed.
[ -f "$logs/end" ] && code=$(head -n 1 "$logs/end")

[ "$code" -ne 0 ] && /venv/bin/python -m lightning_dist.cli.launch.failure "$logs"
if [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "$code" -ne 75 ] && [ "$restarts" -lt 3 ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -eq 75 ] && ! scontrol show job "$SLURM_JOB_ID" | grep -q PreemptTime=None; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_USERS_SCRIPT = """\
import os, pathlib, signal, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "start", os.environ["TORCHELASTIC_RESTART_COUNT"])
print("arguments", sys.argv[1:], file=sys.stderr)
pathlib.Path("rank" + os.environ["RANK"]).touch()
while not pathlib.Path("rank0").exists():
    time.sleep(0.01)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    exec(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command in an empty folder, without what a launcher has set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(rank.FOLDER, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_script_of_slurm() -> None:
    job = Job(("fit", "-c", "my run.yaml"), 2, 8, 3, Path("/runs/a"))
    assert script(job, ("partition=gpu", "exclusive"), "/venv/bin/python") == _SCRIPT_OF_SLURM
    on_cpus = Job(("train.py", "--lr=1"), 1, 4, 0, Path("/runs/a"), on_gpu=False)
    text = script(on_cpus, ("requeue=", "signal=B:USR1@10"), "python")
    assert "gpus-per-node" not in text
    assert "#SBATCH --signal=B:USR1@10\n" in text
    assert "python -m lightning_dist.cli.launch.rank train.py --lr=1\n" in text


@pytest.mark.parametrize(
    ("options", "rendezvous"),
    [
        ([], "--standalone"),
        (["--on=torchrun", "--nodes=2", "--head=node1"], "--rdzv-backend=c10d --rdzv-endpoint=node1:29400"),
        (["--on=torchrun", "--nodes=2", "--head=node1:1234"], "--rdzv-backend=c10d --rdzv-endpoint=node1:1234"),
        (["--on=torchrun", "--nodes=1:2", "--head=node1"], "--rdzv-backend=c10d --rdzv-endpoint=node1:29400"),
        (["--on=torchrun", "--nodes=2", "--head=[::1]"], "--rdzv-backend=c10d '--rdzv-endpoint=[::1]:29400'"),
    ],
)
def test_command_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], options: list[str], rendezvous: str
) -> None:
    nodes = options[1].partition("=")[2] if options else "1"
    command = ["launch", *options, "--devices=4", "--logs=logs", "--dry-run", "--", "fit", "-c", "my.yaml"]
    assert run_command(monkeypatch, *command) == 0
    logs = Path("logs").absolute()
    assert capfd.readouterr().out == (
        f"LIGHTNING_DIST_LAUNCH_LOGS={logs} torchrun --nnodes={nodes} --nproc-per-node=4 --max-restarts=0"
        f" --rdzv-id=launch {rendezvous} --log-dir={logs} --redirects=3 -m lightning_dist.cli.launch.rank"
        f" fit{' --ckpt_path=auto' * (':' in nodes)} -c my.yaml --trainer.devices=4 --trainer.num_nodes={nodes[-1]}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--devices: give the number of devices of each node, at least 1."),
        ("--devices 0 -- fit", "--devices=0: give the number of devices"),
        ("--devices 2", "nothing to launch. Give the command after two hyphens"),
        ("--devices 2 fit -c my.yaml", "write two hyphens before 'fit': lightning-dist launch -- fit"),
        ("--devises 2 -- fit", "no option is named --devises; did you mean '--devices'?"),
        ("--devices 2 -- fitt", "cannot launch 'fitt'; did you mean 'fit'? After the two hyphens stands one of fit,"),
        ("--devices 2 -- train.py", "there is no script 'train.py'."),
        ("--devices 2 -- fit --trainer.devices=4", "--trainer.devices=4, but --devices is 2. Leave"),
        ("--devices 2 -- fit --trainer.num_nodes 3", "--trainer.num_nodes=3, but --nodes is 1. Leave"),
        ("--devices 2 --nodes 0 -- fit", "--nodes=0: expected at least 1."),
        ("--devices 2 --max-restarts -1 -- fit", "--max-restarts=-1: expected at least 0."),
        ("--devices 2 --nodes 2 -- fit", "--nodes=2, but --on=local starts the processes of this node alone. Give"),
        ("--on torchrun --devices 2 --nodes 2 -- fit", "--nodes=2 needs --head HOST"),
        ("--devices 2 --nodes a -- fit", "argument --nodes: 'a': expected a number, or MIN:MAX"),
        ("--devices 2 --nodes 3:2 -- fit", "--nodes=3:2: expected the smaller number first, as in --nodes 1:4."),
        ("--on slurm --devices 2 --nodes 1:2 -- fit", "--nodes=1:2: a job of SLURM has a fixed number of nodes."),
        ("--devices 2 --head node1 -- fit", "--head=node1: --on=local uses it with --elastic only."),
        ("--devices 2 --replicas 0 -- fit", "--replicas without --elastic: give --elastic MIN:MAX as well"),
        ("--on slurm --devices 2 --replicas 0 -- fit", "--replicas=0 belongs to --on local; --on=slurm does not"),
        ("--devices 2 --elastic 1:2 --replicas 0,2 -- fit", "--replicas=0,2 with --elastic=1:2: expected indices from"),
        ("--devices 2 --elastic 1:2 --replicas 0,0 -- fit", "argument --replicas: '0,0': expected indices of replicas"),
        ("--devices 2 --elastic 1:2 --replicas 0 -- fit", "the other replicas are on other nodes. Give --head HOST"),
        ("--devices 2 --elastic 1:2 --head a:b -- fit", "--head='a:b': expected HOST or HOST:PORT."),
        ("--devices 2 --wait 5 -- fit", "--wait=5.0 belongs to --on ray; --on=local does not use it."),
        ("--on ray --devices 2 --wait -1 -- fit", "--wait=-1.0: expected at least 0."),
        ("--on torchrun --devices 2 --head a:b -- fit", "--head='a:b': expected HOST or HOST:PORT."),
        ("--devices 2 --sbatch time=1 -- fit", "--sbatch=time=1 belongs to --on slurm; --on=local does not use it."),
        (
            "--devices 2 --accelerator gpu -- fit",
            "--accelerator=gpu belongs to --on slurm or --on ray; --on=local",
        ),
        ("--on slurm --devices 2 --logs=a\u00a0b -- fit", "SLURM reads no spaces in the names of folders."),
        ("--on slurm --devices 2 --sbatch=--time=1 -- fit", "--sbatch='--time=1': expected NAME=VALUE without hyphens"),
        ("--on slurm --devices 2 -- fit", "--on=slurm, but there is no sbatch on this machine."),
        ("--devices 2 --elastic 2 -- fit", "argument --elastic: '2': expected the smallest and the largest number of"),
        ("--devices 2 --elastic 3:2 -- fit", "argument --elastic: '3:2': expected the smallest and the largest"),
        ("--devices 2 --elastic 1:1 -- fit", "argument --elastic: '1:1': one replica has no other"),
        ("--devices 2 --heartbeat 2 -- fit", "--heartbeat=2: expected a number above 0, beside --elastic."),
        ("--devices 2 --elastic 1:2 --heartbeat 0 -- fit", "--heartbeat=0: expected a number above 0"),
        ("--devices 2 --elastic 1:2 -- validate", "--elastic=1:2 with 'validate': only a fit has replicas that"),
        ("--on slurm --devices 2 --elastic 1:2 -- fit", "--elastic=1:2 belongs to --on local; --on=slurm does not"),
        ("--on flux --devices 2 -- fit", "invalid choice: 'flux' (choose from 'local', 'torchrun', 'slurm', 'ray')"),
    ],
)
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    monkeypatch.setenv("PATH", "")
    assert run_command(monkeypatch, "launch", *filter(None, arguments.split(" "))) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.startswith("error: lightning-dist launch: ")
    assert list(Path().iterdir()) == []


def test_ray_is_needed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lightning_dist.cli.launch.ray.find_spec", lambda name: None)
    assert run_command(monkeypatch, "launch", "--on=ray", "--devices=2", "--", "fit") == 2
    assert "--on=ray needs Ray, which is not installed: pip install 'lightning-dist[ray]'." in capfd.readouterr().err


def test_description_of_a_run_on_ray(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--on=ray", "--nodes=1:4", "--devices=8", "--max-restarts=3", "--wait=60", "--logs=/runs/a", "--dry-run"]
    assert run_command(monkeypatch, "launch", *words, "--", "fit", "-c", "my.yaml") == 0
    assert capfd.readouterr().out == (
        "# cluster: that of this machine, or a new one for this run\n"
        "# 1 to 4 nodes with {'GPU': 8} each, for which it waits 60 s; at most 3 restarts\n"
        "# Each node runs:\n"
        "python -m lightning_dist.cli.launch.node --node=NODE --nodes=NODES --devices=8 --head=FIRST_NODE:PORT"
        " --logs=/runs/a/start_K -- fit --ckpt_path=auto -c my.yaml\n"
    )


def test_torchft_is_needed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_command(monkeypatch, "launch", "--devices=1", "--elastic=1:2", "--", "fit") == 2
    assert (
        "--elastic needs torchft, which is not installed: pip install 'lightning-dist[elastic]'."
        in capfd.readouterr().err
    )


def test_description_of_replicas(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        "--devices=2",
        "--elastic=2:3",
        "--heartbeat=0.5",
        "--logs=logs",
        "--dry-run",
        "--",
        "fit",
        "-c",
        "my.yaml",
    ]
    assert run_command(monkeypatch, "launch", *words) == 0
    assert capfd.readouterr().out == (
        "# The coordinator, which leaves a replica out after 0.5 s without a sign of life:\n"
        "python -m lightning_dist.cli.launch.coordinator 127.0.0.1:PORT 2 500\n"
        "# Each of 2 ranks of each of 3 replicas, with their numbers in the environment:\n"
        "LIGHTNING_DIST_ELASTIC=2:3 LIGHTNING_DIST_REPLICA=INDEX TORCHFT_LIGHTHOUSE=http://127.0.0.1:PORT"
        f" LIGHTNING_DIST_LAUNCH_LOGS={Path('logs').absolute()}/replica_INDEX"
        " python -m lightning_dist.cli.launch.rank fit --ckpt_path=auto -c my.yaml --trainer.devices=2"
        " --trainer.num_nodes=1\n"
    )


def test_description_of_the_replicas_of_a_node(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "--devices=2", "--elastic=2:3", "--head=node1", "--logs=logs", "--dry-run"]
    for replicas, listens in (("0", True), ("2,1", False)):
        assert run_command(monkeypatch, *words, f"--replicas={replicas}", "--", "fit", "-c", "my.yaml") == 0
        output = capfd.readouterr().out
        assert ("launch.coordinator 0.0.0.0:29510 2 1000\n" in output) is listens
        assert f"# Each of 2 ranks of each of the replicas {'0' if listens else '1,2'}, with their numbers" in output
        assert "TORCHFT_LIGHTHOUSE=http://node1:29510" in output


@pytest.mark.parametrize(
    ("statement", "code", "text"),
    [
        ("pass", 0, "rank 0 of 4 start 0"),
        ("sys.exit(7)", 7, "rank 1 exited with code 7. Its output is in "),
        ("raise ValueError('no such row')", 1, "ValueError: no such row"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was ended by signal 9 (SIGKILL)."),
        ("sys.exit(75)", 75, ""),
        ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(9)", 143, ""),
    ],
)
def test_ranks_of_a_node_whose_number_is_known(statement: str, code: int, text: str) -> None:
    script = _USERS_SCRIPT if code in (0, 75) else f"{_USERS_SCRIPT}time.sleep(99)\n"  # Rank 0 is ended.
    Path("train.py").write_text(script)
    words = ["--node=0", "--nodes=2", "--devices=2", "--head=[::1]:1234", "--logs=logs", "--", "train.py", statement]
    ran = subprocess.run(
        [sys.executable, "-m", "lightning_dist.cli.launch.node", *words], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == code, ran.stderr
    assert text in ran.stdout + ran.stderr
    assert "rank 1 of 4 start 0" in Path("logs/attempt_0/rank_1.out").read_text()


def test_a_coordinator_that_cannot_listen(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        head = f"--head=localhost:{taken.getsockname()[1]}"
        code = run_command(monkeypatch, "launch", "--devices=1", "--elastic=1:2", head, "--logs=logs", "--", "fit")
    assert code == 1
    error = capfd.readouterr().err
    assert f"cannot listen at 0.0.0.0:{head.rpartition(':')[2]}" in error and "Give another port by --head" in error
    assert "in use" in Path("logs/coordinator.err").read_text()


def test_values_of_options() -> None:
    words = ("fit", "--a=1", "--b", "2", "--a", "3", "--ab=4")
    assert [value_of(words, option) for option in ("--a", "--b", "--ab", "--c")] == ["3", "2", "4", None]


@pytest.mark.parametrize(
    ("statement", "restarts", "code", "ends"),
    [
        ("pass", 0, 0, []),
        ("sys.exit(7)", 1, 0, []),
        ("sys.exit(7)", 0, 7, ["rank 1 exited with code 7. Its output is in "]),
        ("raise ValueError('no such row')", 0, 1, ["ValueError: no such row", "rank 1 exited with code 1."]),
        ("os.kill(os.getpid(), signal.SIGKILL)", 0, 137, ["rank 1 was ended by signal 9 (SIGKILL)."]),
        ("sys.exit(2)", 2, 2, ["rank 1 exited with code 2."]),
        ("sys.exit(75)", 2, 75, []),
    ],
)
def test_ranks_of_a_script(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    statement: str,
    restarts: int,
    code: int,
    ends: list[str],
) -> None:
    Path("train.py").write_text(_USERS_SCRIPT)
    if code in (1, 7):  # The folder of an earlier launch, which had restarted more often, is given again.
        Path("logs/attempt_9").mkdir(parents=True)
    logging = ["--logs=logs", f"--max-restarts={restarts}"]
    assert run_command(monkeypatch, "launch", "--devices=2", *logging, "--", "train.py", statement) == code
    printed = capfd.readouterr()
    assert printed.out.startswith("rank 0 of 2 start 0\n")
    assert "rank 1" not in printed.out
    for end in ends:
        assert end in printed.err
    assert ("launch: " in printed.err) == bool(ends)
    attempts = sorted(path.name for path in Path("logs").glob("attempt_[0-8]"))
    starts_again = restarts and code == 0
    if code in (0, 1, 7, 137):
        assert attempts == (["attempt_0", "attempt_1"] if starts_again else ["attempt_0"])
    first, last = (Path("logs", name, "rank_1.out") for name in (attempts[0], attempts[-1]))
    assert first.read_text() == "rank 1 of 2 start 0\n"
    assert (
        last.read_text() == {True: "rank 1 of 2 start 1\n", False: "rank 1 of 2 start 0\n"}[bool(starts_again)] or code
    )
    assert Path("logs", "attempt_0", "rank_1.err").read_text().startswith(f"arguments [{statement!r}]")


def test_a_rank_ends_as_the_launch_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    monkeypatch.setenv(rank.FOLDER, ".")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert [rank.main(["train.py", code]) for code in ("0", "1", "75", "0", "1")] == [0, 1, 75, 75, 75]
    assert rank.end_of(Path()) == rank.End(75, 0, 0)
    Path("end").unlink()
    assert [rank.main(["train.py", code]) for code in ("76", "2", "0")] == [76, 2, 2]


def test_the_rank_that_failed_first_is_shown() -> None:
    lost = "a warning\nTraceback (most recent call last):\nRuntimeError: Connection reset by peer\n"
    Path("rank_0.err").write_text(lost)
    Path("rank_1.err").write_text("a warning\n[rank 1] error: model: no such file\n  at train.py:1\n")
    Path("rank_2.err").write_text("a warning\n")
    here = Path()
    assert first_error(here, [Failure(2, 1), Failure(0, 1), Failure(1, 1)])[0].rank == 0
    chosen, text = first_error(here, [Failure(2, 1), Failure(1, 1), Failure(0, 1)])
    assert (chosen.rank, text) == (1, "[rank 1] error: model: no such file\n  at train.py:1")
    assert first_error(here, [Failure(0, 1), Failure(2, -signal.SIGSEGV)]) == (Failure(2, -11), "")
    assert first_error(here, [Failure(0, 1), Failure(2, -signal.SIGTERM)])[0].rank == 0
    assert first_error(here, [Failure(0, 1), Failure(3, 76)]) == (Failure(3, 76), "")
    assert Failure(2, -11).how() == "rank 2 was ended by signal 11 (SIGSEGV)"
    assert Failure(2, 76).how() == "rank 2 exited with code 76"


@pytest.mark.parametrize(
    ("number", "does", "code"), [(signal.SIGTERM, "exit(75)", 75), (signal.SIGINT, "exit(0)", 130)]
)
def test_a_signal_reaches_the_ranks(number: signal.Signals, does: str, code: int) -> None:
    Path("train.py").write_text(
        "import pathlib, signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: (print('saved'), sys.{does}))\n"
        "print('ready')\n"
        "time.sleep(100)\n"
    )
    words = ["launch", "--devices=2", "--max-restarts=3", "--logs=logs", "--", "train.py"]
    launch = subprocess.Popen([sys.executable, "-m", "lightning_dist.cli", *words], env=_environment())
    paths = [Path("logs", "attempt_0", f"rank_{index}.out") for index in range(2)]
    deadline = time.monotonic() + 60.0
    while not all(path.is_file() and path.read_text() == "ready\n" for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launch.send_signal(number)
    assert launch.wait(60.0) == code
    assert [path.read_text() for path in paths] == ["ready\nsaved\n"] * 2
    assert [path.name for path in Path("logs").glob("attempt_*")] == ["attempt_0"]


def _environment() -> dict[str, str]:
    """Return the environment variables without those that a launcher has set in this process."""
    return {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}


def test_two_nodes_meet_at_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the same command twice on this machine, as on two nodes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    Path("train.py").write_text(
        "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'])"
    )
    words = ["launch", "--on=torchrun", "--nodes=2", "--devices=2", f"--head=localhost:{port}", "--", "train.py"]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "lightning_dist.cli", *words[:-2], f"--logs=logs{node}", *words[-2:]],
            env=_environment(),
        )
        for node in range(2)
    ]
    assert [node.wait(100) for node in nodes] == [0, 0]
    lines = [path.read_text().split() for path in sorted(Path().glob("logs*/attempt_0/rank_*.out"))]
    assert sorted(lines) == [["0", "4", "0"], ["1", "4", "0"], ["2", "4", "1"], ["3", "4", "1"]]
