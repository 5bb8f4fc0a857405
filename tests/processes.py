"""What tests want to know of processes that are not their own children."""

from pathlib import Path


def process_exists(pid: int) -> bool:
    """Not gone, and not a corpse that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
