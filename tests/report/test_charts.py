"""Charts name documented metrics, and only those of which a run has data are shown."""

from megatron_dapo.metrics import undocumented
from megatron_dapo.report import charts
from megatron_dapo.report.charts import sections
from megatron_dapo.report.run_files import read_run


def test_every_chart_names_documented_metrics():
    groups = (charts.LEARNING, charts.POLICY, charts.LENGTHS, charts.AGREEMENT, charts.SPEED, charts.MOE)
    names = {name for group in groups for chart in group for _, name in chart.series}
    names |= {name for group in groups for chart in group for name in chart.band or ()}
    assert len(names) > 60 and undocumented(names) == []


def test_the_example_shows_every_section_with_data_only(run_dir):
    run = read_run(run_dir)
    shown = sections([run])
    assert [s.key for s in shown] == ["learning", "policy", "lengths", "filter", "agreement", "speed", "moe"]
    assert {name for s in shown for c in s.charts for _, name in c.series} <= set(run.names)
    titles = {c.title for s in shown for c in s.charts}
    assert "Score" in titles and "Critic: value loss" not in titles


def test_validation_and_stages_come_from_the_run(run_dir):
    by_title = {c.title: c for s in sections([read_run(run_dir)]) for c in s.charts}
    assert [label for label, _ in by_title["Validation: aime-2024"].series] == ["mean@32", "maj@32"]
    stages = [label for label, _ in by_title["Where a step's seconds go"].series]
    assert stages == ["gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights"]
    groups = [label for label, _ in by_title["Groups of a step"].series]
    assert groups == ["kept", "dropped, all 0", "dropped, all 1", "failed"]


def test_a_validation_source_with_slashes_keeps_its_name(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val-core/openai/gsm8k/acc/mean@8": 0.5}\n')
    assert sections([read_run(tmp_path)])[0].charts[0].title == "Validation: openai/gsm8k"


def test_a_run_without_metrics_has_no_sections(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert sections([read_run(tmp_path)]) == []
