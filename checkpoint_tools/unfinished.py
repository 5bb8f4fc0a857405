"""The hidden directory of a conversion under way, and what makes it the same conversion when it is begun again."""

import json
import shutil
from pathlib import Path
from typing import Any

STATE = "conversion.json"


def continue_or_begin(temporary: Path, what: list[Any]) -> None:
    """Keep what an interrupted conversion has finished only if it was the very same one: `what` says which."""
    state, file = json.dumps(what), temporary / STATE
    if not file.is_file() or file.read_text() != state:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        file.write_text(state)


def weight_files(source: Path) -> list[Any]:
    """The source of a conversion as it is now."""
    files = [[file.name, file.stat().st_mtime_ns, file.stat().st_size] for file in sorted(source.glob("*.safetensors"))]
    return [str(source.resolve()), files]
