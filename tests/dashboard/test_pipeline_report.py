import pytest

from paddock.dashboard import read_pipeline_report, write_pipeline_report
from paddock.dashboard.run_view import ReportError
from paddock.journal import Journal


@pytest.fixture
def folder(tmp_path):
    example = {
        "messages": [
            {"role": "user", "content": "2 + 2 <?>"},
            {
                "role": "assistant",
                "content": "4",
                "reasoning": "two and two",
                "tool_calls": [{"id": "1", "name": "calc", "arguments": {"sum": "2 + 2"}}],
            },
        ],
        "result": "reward 1",
    }
    with Journal(tmp_path) as journal:
        journal.log_event("pipeline_started", stages=["sft", "rl"], seed=7)
        journal.log_event("stage_finished", stage="sft", description="talks", seconds=61.0)
        journal.log_event(
            "suite_result", stage="sft", suite="reasoning", score=0.4, stderr=0.03, examples=[]
        )
        journal.log_event("suite_result", stage="sft", suite="loss", score=1.2, better="lower")
        journal.log_event("stage_finished", stage="rl", description="thinks", seconds=30.0)
        journal.log_event(
            "suite_result",
            stage="rl",
            suite="reasoning",
            score=0.9,
            stderr=0.02,
            examples=[example],
        )
        journal.log_event("suite_result", stage="rl", suite="loss", score=1.0, better="lower")
        journal.log_event("stage_finished", stage="general", description="obeys", seconds=9.0)
        journal.log_event(
            "suite_result", stage="general", suite="reasoning", score=0.45, stderr=0.04
        )
        journal.log_event("suite_result", stage="general", suite="loss", score=1.3, better="lower")
    with Journal(tmp_path / "rl") as journal:
        for step in range(5):
            journal.log_metrics(step, reward=step / 5, step_time_s=1.0)
    return tmp_path


def test_best_and_retained_scores(folder):
    report = read_pipeline_report(folder)
    assert report.seed == 7
    assert [stage.name for stage in report.stages] == ["sft", "rl", "general"]
    assert report.best_score("reasoning") == 0.9
    assert report.retained("reasoning") == "50%"
    assert report.best_score("loss") == 1.0
    assert report.retained("loss") == "+0.300"


def test_a_rerun_stage_replaces_its_scores(folder):
    with Journal(folder) as journal:
        journal.log_event("stage_reset", stage="general")
        journal.log_event("stage_finished", stage="general", seconds=5.0)
        journal.log_event("suite_result", stage="general", suite="reasoning", score=0.8)
    report = read_pipeline_report(folder)
    assert report.stages[-1].scores == {"reasoning": 0.8}
    assert report.retained("reasoning") == "89%"


def test_the_page_shows_the_report_and_escapes_model_output(folder):
    text = write_pipeline_report(folder).read_text()
    for part in ("thinks", "two and two", "2 + 2 &lt;?&gt;", "calc(", "1 min 40 s", "50%"):
        assert part in text
    assert "<?>" not in text
    assert "Run folder not found" in text  # for sft, which has no folder here


def test_a_stage_with_several_tasks_shows_the_reward_of_each(folder):
    with Journal(folder / "general") as journal:
        for step in range(5):
            journal.log_metrics(
                step, reward=step / 5, **{"reward/sums": step / 4, "reward/tools": step / 6}
            )
    text = write_pipeline_report(folder).read_text()
    assert "Reward by task" in text
    assert "steps" in text


def test_a_folder_without_a_pipeline_is_rejected(tmp_path):
    with pytest.raises(ReportError, match="not a pipeline run"):
        read_pipeline_report(tmp_path)
