"""``facts-recall``: counts on hand-made answers, verdicts that can go either way, every question asked once in every way."""

import pandas as pd
import pytest
import torch

from kvlens.papers.iclca import facts_recall
from kvlens.papers.iclca.facts_recall import DROPPED, EQUAL, EXACT, LOGITS, NO_FIT, POLISHED
from kvlens.tasks.facts import FactsTask, answers_after_story, answers_without_story, guess_in_story
from kvlens.training import build_model


def made_answers(n_stories: int, kept: dict[str, int], n_questions: int = 4, dropped: int = 0) -> pd.DataFrame:
    """Each story: the first question wrong even with the story, ``kept[way]`` of the others kept at a quarter."""
    kept, rows = {POLISHED: kept[LOGITS], **kept}, []
    for story in range(n_stories):
        for question in range(n_questions):
            right = question > 0
            shared = dict(story=story, question=question, kind="place", right_with_story=right)
            rows.append({**shared, "way": EXACT, "ratio": 1.0, "keys": 28.0, "is_right": right})
            rows.append({**shared, "way": DROPPED, "ratio": 0.0, "keys": 0.0, "is_right": question <= dropped - 1})
            rows += [
                {**shared, "way": way, "ratio": 0.25, "keys": 7.0, "is_right": 0 < question <= n} for way, n in kept.items()
            ]
    return pd.DataFrame(rows)


def verdicts(answers: pd.DataFrame) -> list[bool | None]:
    return [c.holds for c in facts_recall.compare(answers, guess=0.4)][1:]


def test_only_answers_right_with_the_story_are_counted():
    table = facts_recall.share_kept(made_answers(5, {LOGITS: 3, EQUAL: 2, NO_FIT: 0})).set_index("way")
    assert table["n_answers"].tolist() == [15] * 6
    assert table.loc[[EXACT, DROPPED, LOGITS, EQUAL, NO_FIT], "n_kept"].tolist() == [15, 0, 15, 10, 0]
    assert table.loc[LOGITS, "share_kept"] == 1.0 and table.loc[LOGITS, "keys"] == 7.0


def test_verdicts_go_either_way_and_few_answers_give_none():
    assert verdicts(made_answers(200, {LOGITS: 3, EQUAL: 3, NO_FIT: 2})) == [True, True, True, True, True]
    assert verdicts(made_answers(200, {LOGITS: 2, EQUAL: 3, NO_FIT: 3}, dropped=3)) == [True, False, False, False, False]
    # 15 of 15 do not show that 99 of 100 are kept; five stories cannot tell a gain; 0 of 20 is below 0.4.
    assert verdicts(made_answers(5, {LOGITS: 3, EQUAL: 3, NO_FIT: 2})) == [True, None, None, None, True]
    broken = made_answers(5, {LOGITS: 3, EQUAL: 3, NO_FIT: 2})
    broken.loc[(broken["way"] == EXACT) & (broken["story"] == 2), "is_right"] = False
    assert verdicts(broken)[0] is False


def test_the_settings_are_options_of_the_methods():
    named = [name for name, _, _ in facts_recall.ways(facts_recall.facts_recall.scales["small"])]
    assert named == [EXACT, *[LOGITS, EQUAL, NO_FIT] * 3, POLISHED, LOGITS, EQUAL, NO_FIT]


def test_measuring_asks_every_first_time_question_once_in_every_way():
    task = FactsTask(min_facts=3, max_facts=3, length=90)
    model = build_model(task, dict(n_layers=1, d_model=16, d_head=8, positional_embedding_type="standard"))
    stories = task.stories(3, torch.Generator().manual_seed(0), "heldout")
    settings = dict(
        ratios=[0.25], reference=dict(n_continuations=2, continuation_length=6), polish=dict(polish_steps=2), seed=0
    )
    answers = facts_recall.measure(model, stories, facts_recall.ways(settings), first_story=10)
    assert answers.groupby("way").size().to_dict() == dict.fromkeys((EXACT, DROPPED, LOGITS, EQUAL, NO_FIT, POLISHED), 9)
    exact, dropped = (answers[answers["way"] == way] for way in (EXACT, DROPPED))
    assert set(answers["story"]) == {10, 11, 12}
    assert (
        exact["is_right"].tolist()
        == exact["right_with_story"].tolist()
        == answers_after_story(model, stories).is_right.tolist()
    )
    assert dropped["is_right"].tolist() == answers_without_story(model, stories).is_right.tolist()
    assert exact["keys"].tolist() == [story.n_prompt_tokens for story in stories for _ in range(3)]
    most = [-(-story.n_prompt_tokens // 4) for story in stories for _ in range(3)]
    for way in (LOGITS, EQUAL, NO_FIT, POLISHED):  # fewer where a fitted weight is 0
        keys = answers.loc[answers["way"] == way, "keys"]
        assert all(0 < n <= bound for n, bound in zip(keys, most, strict=True))


def test_chance_is_one_in_the_values_of_its_kind():
    stories = FactsTask(min_facts=6, max_facts=6, length=160).stories(40, torch.Generator().manual_seed(1))
    one_kind = [story for story in stories if len({s.fact.kind for s in story.sentences}) == 1]
    assert len(one_kind) > 3 and guess_in_story(one_kind) == pytest.approx(1 / 6)
    three = [story for story in stories if len({s.fact.kind for s in story.sentences}) == 3]
    assert len(three) > 3 and guess_in_story(three) == pytest.approx(1 / 2)
