"""Kill replicas of a training, again and again, and check every step (``python -m tests.elastic``)."""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import psutil
from mlflow import MlflowClient

from tests.elastic.training import Row, Rows, configure, mistakes_in, store_of

_SECONDS = 240.0
"""The longest time that a scenario waits for something."""


class Training:
    """Run a training of several replicas in a folder, and look at what they have written.

    Args:
        folder: An empty folder, which is created.
        replicas: Number of replicas.
        ranks: Number of ranks of each replica.
        heartbeat: Seconds after which a replica without a sign of life is left out.
        seconds: Time that each step takes in addition.
        logs: Whether the training logs to MLflow.
        failing: Index of a replica whose reductions fail now and then; None: none.
        keeps_batch: Whether each step has the same global batch.
        nodes: Number of launch commands that share the replicas, as they do on several nodes.
    """

    def __init__(
        self,
        folder: Path,
        replicas: int,
        ranks: int,
        heartbeat: float,
        seconds: float,
        logs: bool = False,
        failing: int | None = None,
        keeps_batch: bool = False,
        nodes: int = 1,
    ) -> None:
        self.folder, self.ranks, self.keeps_batch = folder, ranks, keeps_batch
        self._rows = Rows(folder)
        self.everyone = tuple(range(replicas))
        strategy = "DataParallelStrategy" if ranks == 1 else "HybridShardStrategy"
        configuration = configure(folder, strategy, 1_000_000, seconds, logs, failing, keeps_batch)
        words = ["launch", f"--devices={ranks}", f"--elastic=1:{replicas}", "--max-restarts=9999"]
        words += [f"--heartbeat={heartbeat}", f"--logs={folder / 'logs'}"]
        parts = [[f"--replicas={','.join(map(str, range(node, replicas, nodes)))}"] for node in range(nodes)]
        head = [f"--head=localhost:{_free_port()}"] if nodes > 1 else []
        self.launches = list[subprocess.Popen[str]]()
        for part in parts:
            command = [sys.executable, "-m", "lightning_dist.cli", *words, *head, *part, "--", "fit"]
            with (folder / "launch.txt").open("a") as output:
                self.launches.append(
                    subprocess.Popen([*command, "-c", str(configuration)], stdout=output, stderr=output, text=True)
                )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for launch in self.launches:
            launch.kill()
            launch.wait()

    def children(self) -> list[psutil.Process]:
        """Return the processes that the launch commands have started and that run now."""
        return [child for launch in self.launches for child in psutil.Process(launch.pid).children()]

    def rows(self) -> list[Row]:
        """Return what all ranks have written so far."""
        return list(self._rows.read())

    def latest(self) -> list[Row]:
        """Return the newest row of each rank."""
        return list({(row.replica, row.rank): row for row in self.rows()}.values())

    def until(self, condition: Callable[[list[Row]], bool]) -> list[Row]:
        """Wait until ``condition`` is true of the rows, and return them.

        Raises:
            AssertionError: If it is not within some minutes, or the training has ended.
        """
        end = time.monotonic() + _SECONDS
        while not condition(rows := self.rows()):
            codes = [launch.poll() for launch in self.launches]
            assert codes == [None] * len(codes), f"launch has ended with exit codes {codes}"
            assert time.monotonic() < end, f"nothing happened for {_SECONDS:.0f} s: {rows[-3:]}"
            time.sleep(0.1)
        return rows

    def until_all_train(self, since: float = 0.0) -> list[Row]:
        """Wait until all replicas have trained a step together since a time of day."""

        def all_train(rows: list[Row]) -> bool:
            recent = [row for row in rows if row.at > since and row.members == self.everyone]
            return {row.replica for row in recent} == set(self.everyone)

        return self.until(all_train)

    def kill(self, row: Row) -> float:
        """Kill the process that has written ``row``, and return the time of day."""
        at = time.time()
        os.kill(row.pid, signal.SIGKILL)
        return at

    def stop(self) -> int:
        """Ask the training to stop, and return its exit code, which is that of all launch commands.

        Raises:
            AssertionError: If they end with different exit codes.
        """
        for launch in self.launches:
            launch.send_signal(signal.SIGTERM)
        codes = {launch.wait(_SECONDS) for launch in self.launches}
        assert len(codes) == 1, f"exit codes {codes}"
        return codes.pop()

    def check(self) -> str:
        """Stop the training, compare all steps, and return how many there were.

        Raises:
            AssertionError: If anything is wrong.
        """
        code = self.stop()
        rows = self.rows()
        wrong = mistakes_in(rows, len(self.everyone), self.ranks, self.keeps_batch)
        assert not wrong, "\n".join(wrong[:10])
        assert code == 75, f"exit code {code}"
        return f"{max(row.step for row in rows)} steps without a mistake"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def kills(training: Training, number: int, bound: float) -> str:
    """Kill random ranks one after the other, and measure how long the others stall and when the replica is back."""
    training.until_all_train()
    chosen, stalls, returns = random.Random(0), list[float](), list[float]()
    for index in range(number):
        time.sleep(chosen.uniform(0.2, 1.0))
        victim = chosen.choice(training.latest())
        others = set(training.everyone) - {victim.replica}
        at = training.kill(victim)
        rows = training.until(partial(_go_on, others=others, lost=victim, since=at))
        firsts = _first_steps(rows, victim, at)
        stalls += [firsts[replica] - at for replica in others]
        training.until_all_train(max(firsts.values()))
        rows = training.until(partial(_is_back, lost=victim, since=at))  # Other ranks of its replica may be first.
        back = next(row.at for row in rows if row.at > at and _is_its_next_process(row, victim))
        returns.append(back - at)
        print(
            f"kill {index + 1}: rank {victim.rank} of replica {victim.replica} after step {victim.step}; the others"
            f" went on after {', '.join(f'{firsts[one] - at:.2f}' for one in sorted(others))} s; back after"
            f" {returns[-1]:.2f} s",
            flush=True,
        )
    result = training.check()
    text = (
        f"{result}; {number} kills: the others stalled for {median(stalls):.2f} s (median; at most {max(stalls):.2f} s;"
        f" bound {bound:g} s); back after {median(returns):.2f} s (median; at most {max(returns):.2f} s)"
    )
    assert median(stalls) <= bound, text
    return text


def soak(training: Training, minutes: float, every_s: float) -> str:
    """Kill a random rank again and again, and measure which share of their time the others spend on steps.

    Args:
        training: The training.
        minutes: Time from the first kill to the end.
        every_s: Seconds from one kill to the next.
    """
    begin = training.until_all_train()[-1].at
    chosen, kills = random.Random(0), list[tuple[float, int]]()
    while (at := time.time()) < begin + 60 * minutes:
        victim = chosen.choice(training.latest())
        kills.append((training.kill(victim), victim.replica))
        training.until_all_train(at)
        time.sleep(max(at + every_s - time.time(), 0.0))
    end = time.time()
    result = training.check()
    share, capacity = _shares(training.rows(), kills, end)
    text = (
        f"{result}; {len(kills)} kills in {(end - kills[0][0]) / 60:.1f} minutes: survivors spent {share:.2%} of their"
        f" time on steps that count (bound {_SHARE:.0%}), and {1 - capacity:.2%} of the replicas' time was lost besides"
        " while they were away"
    )
    assert share >= _SHARE, text
    return text


_SHARE = 0.95
"""The smallest share of their time that survivors must spend on steps."""


def _shares(rows: list[Row], kills: list[tuple[float, int]], end: float) -> tuple[float, float]:
    """Return the shares of their time that survivors spent on steps, and that all replicas were there.

    A survivor is a replica that is not killed, from one kill to the next. A gap between two of its steps counts as a
    step up to twice their median.
    """
    spent = present = total = 0.0
    ends = [at for at, _ in kills[1:]] + [end]
    replicas = sorted({row.replica for row in rows})
    for (begin, victim), until in zip(kills, ends, strict=True):
        for replica in replicas:
            at = [row.at for row in rows if row.replica == replica and row.rank == 0 and begin <= row.at <= until]
            if replica == victim:
                there = [one for one in at if one > begin + 0.5]  # It may write its last row after it was chosen.
                present += until - there[0] if there else 0.0
                continue
            present += until - begin
            gaps = [after - before for before, after in zip([begin, *at], [*at, until], strict=True)]
            longest = 2 * median(gaps)
            spent += sum(min(gap, longest) for gap in gaps)
            total += until - begin
    return spent / total, present / (len(replicas) * (end - kills[0][0]))


def _first_steps(rows: list[Row], lost: Row, since: float) -> dict[int, float]:
    """Return when each replica has trained for the first time after another one was lost.

    Args:
        rows: What all ranks have written.
        lost: A row of the process that was killed.
        since: Time of day at which it was killed.
    """
    recent = [row for row in rows if row.at > since]
    # A replica may be back before the others have noticed that it was lost.
    back = min((row.step for row in recent if _is_its_next_process(row, lost)), default=None)
    after = [row for row in recent if lost.replica not in row.members or (back is not None and row.step >= back)]
    return {row.replica: row.at for row in reversed(after)}


def _is_its_next_process(row: Row, lost: Row) -> bool:
    return (row.replica, row.rank) == (lost.replica, lost.rank) and row.pid != lost.pid


def _is_back(rows: list[Row], lost: Row, since: float) -> bool:
    return any(row.at > since and _is_its_next_process(row, lost) for row in rows)


def _go_on(rows: list[Row], others: set[int], lost: Row, since: float) -> bool:
    return set(_first_steps(rows, lost, since)) >= others


def two_at_once(training: Training) -> str:
    """Kill all replicas but one at the same moment."""
    training.until_all_train()
    victims = [next(row for row in training.latest() if row.replica == one) for one in training.everyone[1:]]
    at = max(training.kill(row) for row in victims)
    training.until(lambda rows: any(row.at > at and row.members != training.everyone for row in rows))
    training.until_all_train(at)
    return training.check()


def the_leader(training: Training) -> str:
    """Kill the replica that logs and writes checkpoints, and let another one write some and go on with the same run."""
    training.until(lambda rows: max((row.step for row in rows), default=0) > 25)
    leader = training.latest()[0].leader
    victim = next(row for row in training.latest() if row.replica == leader)
    at = training.kill(victim)
    # It may also be back and lead again before the others have noticed that it was lost.
    training.until(
        lambda rows: any(row.at > at and (row.leader != leader or _is_its_next_process(row, victim)) for row in rows)
    )
    before = set(training.folder.glob("checkpoints/*.ckpt"))
    training.until(lambda _: bool(set(training.folder.glob("checkpoints/*.ckpt")) - before))
    training.until_all_train(at)
    last = max(row.step for row in training.rows())
    training.until(lambda rows: max(row.step for row in rows) > last + 20)
    result = training.check()
    client = MlflowClient(store_of(training.folder))
    found = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert len(found) == 1, f"{len(found)} runs were logged, and not 1"
    figures = client.get_metric_history(found[0].info.run_id, "elastic/replicas")
    steps = [figure.step for figure in figures]
    assert steps == list(range(9, steps[-1] + 1, 10)) and steps[-1] > last, f"the run has the steps {steps}"
    assert {figure.value for figure in figures} <= {len(training.everyone) - 1.0, len(training.everyone)}
    return f"{result}, in one run of MLflow"


def during_the_return(training: Training) -> str:
    """Kill a replica again as soon as it has been given the state of the run."""
    training.until_all_train()
    victim = next(row for row in training.latest() if row.replica == 1)
    for _ in range(3):
        at = training.kill(victim)
        process = _next_process(training, victim, at)
        time.sleep(0.5)  # It joins, receives the state, or has received it.
        process.kill()
        at = time.time()
        rows = training.until_all_train(at)
        victim = next(row for row in reversed(rows) if row.replica == 1)
    return training.check()


def _next_process(training: Training, victim: Row, since: float) -> psutil.Process:
    """Return the first rank of a replica that has been started after ``since``, once its manager listens."""
    folder = training.folder / "logs" / f"replica_{victim.replica}"
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        for process in training.children():
            with_log = [file for file in _open_files(process) if str(folder) in file and "rank_0" in file]
            if with_log and process.pid != victim.pid and os.path.getctime(with_log[0]) > since:
                return process
        time.sleep(0.02)
    raise AssertionError("the replica was not started again")


def _open_files(process: psutil.Process) -> list[str]:
    try:
        return [file.path for file in process.open_files()]
    except psutil.Error:
        return []


def during_a_checkpoint(training: Training) -> str:
    """Kill the replica that leads right after a step in which it begins a checkpoint."""
    training.until_all_train()
    leader = training.latest()[0].leader
    rows = training.until(lambda rows: any(row.replica == leader and row.step % 50 == 49 for row in rows[-20:]))
    at = training.kill(next(row for row in reversed(rows) if row.replica == leader))
    training.until_all_train(at)
    return training.check()


def the_coordinator(training: Training) -> str:
    """Kill the coordinator, which is started again, and then a replica."""
    training.until_all_train()
    (coordinator,) = [one for one in training.children() if "lightning_dist.cli.launch.coordinator" in one.cmdline()]
    coordinator.kill()
    at = time.time()
    training.until_all_train(at + 2)
    at = training.kill(next(row for row in training.latest() if row.replica == 1))
    training.until_all_train(at)
    return training.check()


def one_falls_behind(training: Training) -> str:
    """Let the reduction of one replica fail in steps that the others count, and let it take over their weights."""
    training.until_all_train()
    training.until(lambda rows: max((row.num_taken_over for row in rows), default=0) >= 3)
    last = max(row.step for row in training.rows())
    rows = training.until(lambda rows: max(row.step for row in rows) > last + 20)
    assert len({row.pid for row in rows}) == len(training.everyone) * training.ranks, "a replica was started again"
    return training.check()


def all_of_them(training: Training) -> str:
    """Kill all replicas at once, which continue from a checkpoint."""
    training.until_all_train()
    training.until(lambda rows: max(row.step for row in rows) > 60)
    victims = training.latest()
    at = max(training.kill(row) for row in victims)
    before = max(row.step for row in training.rows())
    training.until_all_train(at)
    first = next(row.step for row in training.rows() if row.at > at + 0.5)
    code = training.stop()
    assert code == 75, f"exit code {code}"
    assert before - 51 <= first <= before + 1 and first > 1, f"it continued with step {first} after step {before}"
    return f"all were killed after step {before}, and continued with step {first}"


_SCENARIOS: dict[str, Callable[[Training], str]] = {
    function.__name__: function
    for function in (
        two_at_once,
        the_leader,
        during_the_return,
        during_a_checkpoint,
        the_coordinator,
        one_falls_behind,
        all_of_them,
    )
}


def main() -> int:
    """Run what the command line asks for, print what it saw, and return 1 if anything was wrong, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.elastic", description=__doc__)
    parser.add_argument("scenarios", nargs="*", choices=[*_SCENARIOS, []], help="what to do besides random kills")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each replica")
    parser.add_argument("--kills", type=int, default=0, help="number of random kills, one after the other")
    parser.add_argument("--soak", type=float, default=0.0, help="minutes of a training with regular kills")
    parser.add_argument("--every", type=float, default=90.0, help="seconds from one kill of the soak to the next")
    parser.add_argument("--heartbeat", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=0.02, help="time that a step takes in addition")
    parser.add_argument("--fixed-batch", action="store_true", help="let each step have the same global batch")
    parser.add_argument("--nodes", type=int, default=1, help="number of launch commands that share the replicas")
    parser.add_argument("--any-stall", action="store_true", help="do not check how long survivors stall")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="elastic-"))
    bound = float("inf") if options.any_stall else options.heartbeat + 0.5
    todo = [("kills", lambda training: kills(training, options.kills, bound))] if options.kills else []
    todo += [("soak", lambda training: soak(training, options.soak, options.every))] if options.soak else []
    todo += [(name, _SCENARIOS[name]) for name in options.scenarios]
    failed = 0
    for name, function in todo:
        begin = time.monotonic()
        sizes = options.replicas, options.ranks, options.heartbeat, options.seconds
        failing = 1 if name == "one_falls_behind" else None
        with Training(
            folder / name, *sizes, name == "the_leader", failing, options.fixed_batch, options.nodes
        ) as training:
            try:
                result = function(training)
            except AssertionError as error:
                failed += 1
                result = f"FAILED: {error} (the output is in {training.folder})"
        print(f"{name:<20} {result}  ({time.monotonic() - begin:.0f} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
