"""How a rank ends when something goes wrong: the first to fail tells why, once, and every process leaves."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from megatron_dapo.errors import UserError

EXIT_ERROR = 1
EXIT_USER_ERROR = 2
_CLAIM_SECONDS = 120.0


def run_rank(main: Callable[[], None]) -> None:
    """Runs a rank's `main` and leaves the process with the right code, even if other threads or collectives hang.

    A failing rank makes its peers fail in their collectives; only the first rank of a launcher to fail prints.
    """
    try:
        main()
    except SystemExit as request:
        _leave(request.code if isinstance(request.code, int) else EXIT_ERROR)
    except BaseException as error:  # every way out of a rank ends here: a rank that lingers would hang its peers
        if _claim(_first_failure_file()):
            _tell(error)
        if isinstance(error, UserError):
            _leave_word()
            _leave(EXIT_USER_ERROR)
        _leave(EXIT_ERROR)
    _leave(0)


def _leave_word() -> None:
    """For a launcher that does not hear a rank's exit code: the file named by USER_ERROR_FILE says that it was 2."""
    if file := os.environ.get("USER_ERROR_FILE"):
        with contextlib.suppress(OSError):  # then the launcher restarts in vain; the message has been printed
            Path(file).touch()


def _first_failure_file() -> Path:
    """One name for all ranks that the same launcher started."""
    port, attempt = os.environ.get("MASTER_PORT", "0"), os.environ.get("LAUNCH_ATTEMPT", "0")
    return Path(tempfile.gettempdir()) / f"megatron_dapo_failed_{os.getppid()}_{port}_{attempt}"


def _claim(path: Path) -> bool:
    """Whether this process is the first to say so; an old claim of a recycled process id does not count."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _CLAIM_SECONDS:
            path.unlink()
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:
        return True  # the disk is full or the directory is gone: better told twice than not at all
    return True


def _tell(error: BaseException) -> None:
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return
    rank = os.environ.get("RANK", "0")
    text = "".join(traceback.format_exception(error))
    print(f"[rank {rank}] failed:\n{text}", file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    """No interpreter shutdown: it would wait for threads that wait for dead peers. Helper processes go first."""
    for child in multiprocessing.active_children():  # checkpointing keeps one that serves its writers
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class StopRequest:
    """The first Ctrl-C or SIGTERM asks the loop to save and stop after the current step; the second ends at once.

    So does a file that appears, for a driver that signals do not reach: the one named by STOP_FILE.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._file = os.environ.get("STOP_FILE")
        self.exit_code = 0  # what a shell expects of a program that a signal stopped

    def __bool__(self) -> bool:
        if self.exit_code == 0 and self._file and os.path.exists(self._file):
            self.exit_code = 128 + signal.SIGTERM
        return self._event.is_set() or self.exit_code != 0

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self._event.is_set():
            os._exit(128 + number)
        self._event.set()
        self.exit_code = 128 + number
        print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)


def ignore_stop_signals() -> None:
    """Serving ranks and engines leave when the driver tells them to, not when the terminal signals the whole group."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
