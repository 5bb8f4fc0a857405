"""The ledger: what became of every prompt that was ever drawn, one durable line each, in step with the checkpoints.

`<run>/ledger.jsonl` grows by one line when a draw is closed: trained, filtered, failed, stale or surplus. A checkpoint
remembers how long the file was; restoring cuts it there, because what came after happened to a model that is lost. So
the prompts drawn by the loader are at every moment exactly those with a line and those outstanding: `audit` checks it.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.data.dataset import drawn_uids
from megatron_dapo.errors import UserError

LEDGER_FILE = "ledger.jsonl"


class Ledger:
    """Append-only. `sent` counts how often each open prompt went out: more than once after a restart."""

    def __init__(self, path: Path) -> None:
        """Starts a new, empty file; `load_state_dict` continues an old one."""
        self.path = path
        self._file = path.open("ab")
        self._sent: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()

    def issue(self, uids: Iterable[str]) -> None:
        """These prompts are sent (again)."""
        self._sent.update(list(uids))  # a mapping would be added up

    def close(self, uid: str, outcome: str, step: int) -> None:
        """The end of a draw. Raises ValueError for one that is not open."""
        if uid not in self._sent:
            raise ValueError(f"ledger: {uid} cannot become {outcome!r}: it is not open")
        line = {"uid": uid, "outcome": outcome, "step": step, "sent": self._sent.pop(uid)}
        self._file.write(json.dumps(line).encode() + b"\n")
        self.totals[outcome] += 1

    def open(self) -> set[str]:
        """The prompts sent and not closed."""
        return set(self._sent)

    def start_over(self) -> None:
        """A run that continues nothing owes nothing to an old file."""
        self._file.truncate(0)

    def state_dict(self) -> dict[str, Any]:
        """Makes everything so far durable and says where it ends."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": os.fstat(self._file.fileno()).st_size, "sent": dict(self._sent), "totals": dict(self.totals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cuts the file to where it was. Raises UserError where it is shorter: that history is not here."""
        size = os.fstat(self._file.fileno()).st_size
        if size < state["bytes"]:
            raise UserError(
                f"{self.path} has {size} bytes, but the checkpoint was taken when it had {state['bytes']}: copy the "
                "ledger of the run that wrote the checkpoint into trainer.default_local_dir"
            )
        self._file.truncate(state["bytes"])
        self._sent, self.totals = Counter(state["sent"]), Counter(state["totals"])

    def flush(self) -> None:
        """To the operating system: a killed process loses nothing of it."""
        self._file.flush()

    def end(self) -> None:
        self._file.close()


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The closed draws in order of closing. A line torn by a crash at the very end does not count."""
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def audit_checkpoint(run: Path, step: int) -> list[str]:
    """`audit` of a streaming run as of a checkpoint of it."""
    directory = run / "checkpoints" / f"global_step_{step}"
    size = torch.load(directory / "ledger.pt", weights_only=False)["ledger"]["bytes"]
    closed = [json.loads(line) for line in (run / LEDGER_FILE).read_bytes()[:size].splitlines()]
    saved = torch.load(directory / "queue.pt", weights_only=False)
    outstanding = [key for key, (tags, _) in saved.items() if tags["is_prompt"]]
    loader = torch.load(directory / "trainer_state.pt", weights_only=False)["loader"]
    return audit(closed, outstanding, drawn_uids(loader))


def audit(closed: Iterable[Mapping[str, Any]], outstanding: Iterable[str], drawn: Iterable[str]) -> list[str]:
    """What is wrong: a draw closed twice, closed and outstanding, lost, or from nowhere. Empty: each exactly once."""
    times = Counter(line["uid"] for line in closed)
    waiting, expected = set(outstanding), set(drawn)
    problems = [f"{uid} was closed {n} times" for uid, n in times.items() if n > 1]
    problems += [f"{uid} is closed and still outstanding" for uid in waiting & set(times)]
    problems += [f"{uid} was drawn and is lost" for uid in expected - waiting - set(times)]
    problems += [f"{uid} was never drawn" for uid in (waiting | set(times)) - expected]
    return sorted(problems)
