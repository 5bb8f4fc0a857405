"""`megatron-dapo plan`: reads the words, plans, and prints a table or JSON."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.errors import UserError


def plan_command(
    words: Sequence[str], *, as_json: bool = False, search: bool = False, limit: int = 10, html: Path | None = None
) -> tuple[str, bool]:
    """What to print, and whether the plan works. `words` begins with `reshard` for the plan of a weight push."""
    if words and words[0] == "reshard":
        if search or html is not None:
            raise UserError("plan reshard knows neither --search nor --html")
        return _reshard(words[1:], as_json), True
    from megatron_dapo.planner.words import read_request

    request = read_request(words)
    if search:
        from megatron_dapo.planner.search import search as look

        found = look(request, limit)
        if html is not None and found.best:
            from megatron_dapo.planner.plot import write_search

            write_search(found, html)
        if as_json:
            return _json(found.to_dict()), bool(found.best)
        from megatron_dapo.planner.show import search_text

        return search_text(found), bool(found.best)
    from megatron_dapo.planner.run import plan_run

    plan = plan_run(request)
    if html is not None:
        from megatron_dapo.planner.plot import write_run

        write_run(plan, html)
    if as_json:
        return _json(plan.to_dict()), plan.fits
    from megatron_dapo.planner.show import run_text

    return run_text(plan), plan.fits


def _reshard(words: Sequence[str], as_json: bool) -> str:
    from megatron_dapo.planner.reshard import plan_reshard

    plan = plan_reshard(words)
    if as_json:
        return _json(plan.to_dict())
    from megatron_dapo.planner.show import reshard_text

    return reshard_text(plan)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(_finite(value), indent=2) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no infinity: a time that never ends is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
