"""The page is one file that needs no network, holds the runs' data, and really draws in a browser."""

import json
import re
import shutil
import subprocess

import pytest

from megatron_dapo.report import write_report
from megatron_dapo.report.page import page, payload, spaced
from megatron_dapo.report.run_files import read_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def data_of(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def test_one_file_with_everything_inside(run_dir, tmp_path):
    path = write_report([run_dir], tmp_path / "deep" / "report.html")
    html = path.read_text()
    assert write_report([run_dir]) == run_dir / "report.html" and 4e6 < len(html) < 8e6
    outside_scripts = re.sub(r"<script.*?</script>", "", html, flags=re.S)
    assert "http" not in outside_scripts and "{{" not in outside_scripts
    assert not re.search(r"<script[^>]+src=|<link[^>]+stylesheet", html)


def test_data_holds_the_run_and_generated_markup_cannot_end_it(run_dir):
    data = data_of(page(payload(read_runs([run_dir]))))
    run = data["runs"][0]
    assert run["steps"] == list(range(31)) and run["columns"]["critic/score/mean"][0] is None
    assert run["samples"][-1]["step"] == 30 and "</script>" in run["samples"][-1]["best"][0]["response"]
    assert {"step", "load", "assignments", "gpu_load", "gpus_per_node"} == set(run["moe"]["rollout"][-1])
    assert len(run["what_if"]["variants"]) == 4


def test_best_and_worst_samples_do_not_overlap(run_dir):
    for step in payload(read_runs([run_dir]))["runs"][0]["samples"]:
        best, worst = step["best"], step["worst"]
        assert min(s["reward"] for s in best) >= max(s["reward"] for s in worst)
        assert len({s["uid"] for s in best}) == len(best) == 3


def test_not_finite_numbers_become_gaps_and_notes(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "actor/pg_loss": "NaN"}\n{"step": 2, "actor/pg_loss": 0.1234567}\n'
    )
    run = payload(read_runs([tmp_path]))["runs"][0]
    assert run["columns"]["actor/pg_loss"] == [None, 0.123457] and run["notes"][0]["level"] == "bad"


def test_long_texts_are_cut_and_reports_thinned(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "rollouts").mkdir()
    row = {"uid": "a", "prompt": "p", "response": "x" * 20000, "ground_truth": "7", "reward": 1.0, "length": 9}
    (tmp_path / "rollouts" / "1.jsonl").write_text(json.dumps(row) + "\n")
    sample = payload(read_runs([tmp_path]))["runs"][0]["samples"][0]["best"][0]
    assert len(sample["response"]) < 8100 and "12000 characters left out" in sample["response"]
    assert spaced(list(range(100)), 4) == [0, 33, 66, 99] and spaced([1, 2], 4) == [1, 2]


def browse(path, *options: str) -> subprocess.CompletedProcess:
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run --hide-scrollbars"
    command = [CHROMIUM, *flags.split(), "--enable-logging=stderr", "--virtual-time-budget=15000", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to look at the page with (apt-get install chromium)")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_it(run_dir, other_dir, tmp_path, theme):
    image = pytest.importorskip("PIL.Image")
    runs = [run_dir] if theme == "light" else [run_dir, other_dir]
    path = write_report(runs, tmp_path / "report.html")
    url = f"{path.as_uri()}?theme={theme}"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = browse(path, profile, "--window-size=1440,6500", "--dump-dom", url)
    assert "Uncaught" not in done.stderr, done.stderr
    shown = [s for s in payload(read_runs(runs))["sections"]]
    assert done.stdout.count('class="main-svg"') >= sum(len(s["charts"]) for s in shown)
    for title in ("Where a step's seconds go", "Layer × expert", "Samples", "Every metric"):
        assert title in done.stdout
    browse(path, profile, "--window-size=1366,768", f"--screenshot={tmp_path / 'laptop.png'}", url)
    picture = image.open(tmp_path / "laptop.png").convert("RGB")
    assert picture.size == (1366, 768)
    brightness = sum(picture.getpixel((5, 400))) / 3
    assert brightness > 200 if theme == "light" else brightness < 60
    assert len(picture.getcolors(1 << 24)) > 200  # text and curves, not an empty page
