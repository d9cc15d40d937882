"""Keep the output of each rank in files, and show that of rank 0."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from typing_extensions import override

from lightning_dist.cli.launch.failure import attempt_folder


class RankLogs(LogsSpecs):
    """Write the output of each rank to ``attempt_A/rank_R.out`` and ``.err``, and print that of rank 0.

    This is torch's interface for the logs of its elastic agent. A rank is known by its number among the ranks of all
    nodes, so that nodes which share the folder do not write to the same files.

    Args:
        folder: Folder of the logs.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.attempt = folder
        """The folder of the output of the ranks that were started last."""
        self._shown: list[TailLog] = []

    @property
    @override
    def root_log_dir(self) -> str:
        return str(self.folder)

    @override
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of the ranks that are about to be started on this node.

        Args:
            envs: The environment variables of each local rank.
        """
        self.stop()
        self.attempt = attempt_folder(self.folder, int(envs[0]["TORCHELASTIC_RESTART_COUNT"]))
        self.attempt.mkdir(parents=True, exist_ok=True)
        paths = {local: self.attempt / f"rank_{env['RANK']}" for local, env in envs.items()}
        for local, env in envs.items():
            for ending in ("out", "err", "json"):  # An earlier run with this folder may have left them.
                Path(f"{paths[local]}.{ending}").unlink(missing_ok=True)
            env["TORCHELASTIC_ERROR_FILE"] = f"{paths[local]}.json"
            env["PYTHONUNBUFFERED"] = "1"  # Otherwise what a rank has written is lost when it is killed.
        if envs[0]["RANK"] == "0":
            for ending, stream in (("out", sys.stdout), ("err", sys.stderr)):
                self._shown.append(TailLog("rank", {0: f"{paths[0]}.{ending}"}, stream, {0: ""}).start())
        return LogsDest(
            stdouts={local: f"{path}.out" for local, path in paths.items()},
            stderrs={local: f"{path}.err" for local, path in paths.items()},
            error_files={local: f"{path}.json" for local, path in paths.items()},
        )

    def stop(self) -> None:
        """Print what is left of the output of rank 0, and follow it no longer."""
        for shown in self._shown:
            shown.stop()
        self._shown.clear()
