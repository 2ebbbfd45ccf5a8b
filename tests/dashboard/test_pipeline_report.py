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


def test_a_story_knows_the_best_and_what_is_left_of_it(folder):
    story = read_pipeline_report(folder)
    assert story.seed == 7
    assert [stage.name for stage in story.stages] == ["sft", "rl", "general"]
    assert story.best_score("reasoning") == 0.9
    assert story.retained("reasoning") == "50%"
    assert story.best_score("loss") == 1.0
    assert story.retained("loss") == "+0.300"


def test_a_stage_run_anew_replaces_what_was_measured(folder):
    with Journal(folder) as journal:
        journal.log_event("stage_reset", stage="general")
        journal.log_event("stage_finished", stage="general", seconds=5.0)
        journal.log_event("suite_result", stage="general", suite="reasoning", score=0.8)
    story = read_pipeline_report(folder)
    assert story.stages[-1].scores == {"reasoning": 0.8}
    assert story.retained("reasoning") == "89%"


def test_the_page_holds_the_story_and_escapes_what_models_say(folder):
    text = write_pipeline_report(folder).read_text()
    for told in ("thinks", "two and two", "2 + 2 &lt;?&gt;", "calc(", "1 min 40 s", "50%"):
        assert told in text
    assert "<?>" not in text
    assert "Run folder not found" in text  # of sft, which has none here


def test_a_stage_with_several_tasks_shows_the_reward_of_each(folder):
    with Journal(folder / "general") as journal:
        for step in range(5):
            journal.log_metrics(
                step, reward=step / 5, **{"reward/sums": step / 4, "reward/tools": step / 6}
            )
    text = write_pipeline_report(folder).read_text()
    assert "Reward by task" in text
    assert "steps" in text


def test_a_folder_without_a_plan_is_refused(tmp_path):
    with pytest.raises(ReportError, match="not a pipeline run"):
        read_pipeline_report(tmp_path)
