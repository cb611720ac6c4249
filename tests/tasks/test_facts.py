"""Stories and questions: text and tokens agree, answers are where the ground truth says, held-out pairs are held out."""

from collections import Counter

import pytest
import torch
from task_checks import seeded

from kvlens import HookedKVTransformer
from kvlens.tasks import make_task
from kvlens.tasks.facts import FactsTask, answer_shares, scored_questions, word_tokenizer
from kvlens.tasks.stories import INSIDE, ROOM, STATEMENT_KINDS, is_heldout_pair, notes
from kvlens.training import build_model

TASK = FactsTask(min_facts=2, max_facts=7, length=120)
RETOLD = FactsTask(min_facts=4, max_facts=7, length=160, update_share=0.4, pronoun_share=0.7)
NESTED = FactsTask(min_facts=2, max_facts=8, length=128, hops=2, notes=True)
DRAWN = {
    (name, split): task.stories(120, seeded(0), split)
    for name, task in (("plain", TASK), ("retold", RETOLD), ("nested", NESTED))
    for split in ("train", "heldout")
}
EACH_DRAW = pytest.mark.parametrize("drawn", DRAWN, ids="-".join)


@EACH_DRAW
def test_text_and_tokens_are_the_same_story(drawn):
    tokenizer = word_tokenizer(pronouns=True, hops=True)  # a word has the same id in the smaller vocabularies, see below
    for story in DRAWN[drawn]:
        whole = f"{story.prompt} {story.text}"
        assert tokenizer.encode(whole) == story.tokens and len(story.tokens) == story.n_tokens
        assert tokenizer.decode(story.tokens, skip_special_tokens=True) == " " + whole
        assert tokenizer.encode(story.prompt) == story.tokens[: story.n_prompt_tokens]
        assert tokenizer.encode(story.text, add_special_tokens=False) == story.tokens[story.n_prompt_tokens :]


def test_words_of_larger_vocabularies_come_last():
    plain, pronouns, hops = (word_tokenizer(*more).get_vocab() for more in ((), (True,), (True, True)))
    assert {word: pronouns[word] for word in plain} == plain and len(pronouns) == len(plain) + 3  # It, This, person
    assert {word: hops[word] for word in pronouns} == pronouns
    assert [task.d_input for task in (TASK, RETOLD, NESTED)] == [len(plain), len(pronouns), len(hops)]
    assert FactsTask(min_facts=2, max_facts=7, length=160, update_share=1.0).d_input == len(plain)


@EACH_DRAW
def test_the_ground_truth_points_at_subject_value_and_answer_and_the_story_alone_decides_it(drawn):
    """Every value of a kind stands once, and only in pairs of its split; the sentence that is asked for is the last one."""
    tokenizer = word_tokenizer(pronouns=True, hops=True)
    for story in DRAWN[drawn]:
        word = tokenizer.convert_ids_to_tokens(story.tokens)
        last = {(s.fact.kind.name, s.fact.subject): i for i, s in enumerate(story.sentences)}
        for i, sentence in enumerate(story.sentences):
            assert sentence.outdated == (last[sentence.fact.kind.name, sentence.fact.subject] != i)
            subject = sentence.start if sentence.pronoun else sentence.start + sentence.words.index(sentence.fact.subject)
            named = word[subject].removeprefix("\u2581")
            assert named in ("It", "This") if sentence.pronoun else named == sentence.fact.subject
            assert not sentence.pronoun or story.sentences[i - 1].fact.subject == sentence.fact.subject
            assert word[sentence.value_position] == "\u2581" + sentence.fact.value
            assert word[sentence.value_position + 1] == "."
            assert is_heldout_pair(*sentence.fact) == (drawn[1] == "heldout")
        values = [(s.fact.kind.name, s.fact.value) for s in story.sentences]
        assert len(set(values)) == len(values)
        for question in story.questions:
            told = story.sentences[question.origins[0]]
            assert question.fact.value == told.fact.value and question.sentence in last.values()
            assert story.sentences[question.sentence].fact.subject == question.fact.subject
            assert story.tokens[question.value_position] == story.tokens[told.value_position]
            assert word[question.answer_start - 1] == "?" and word[question.end - 1] == "."


@EACH_DRAW
def test_everything_is_asked_once_before_anything_is_asked_again(drawn):
    """A fact of every sentence that holds; in nested stories also the room of every thing."""
    length = {"plain": TASK, "retold": RETOLD, "nested": NESTED}[drawn[0]].length
    for story in DRAWN[drawn]:
        first = [(question.sentence, len(question.origins)) for question in story.questions if not question.repeated]
        assert len(set(first)) == len(first)
        n_asked = sum(1 + (s.fact.kind == INSIDE) for s in story.sentences if not s.outdated)
        if len(story.questions) > n_asked:
            assert len(first) == n_asked
            assert all(question.repeated for question in story.questions[len(first) :])
        assert length - 14 < story.n_tokens <= length  # no question with its answer fits into what is left


def test_updates_come_as_often_as_the_share_says_and_pronouns_often():
    sentences = [sentence for split in ("train", "heldout") for story in DRAWN["retold", split] for sentence in story.sentences]
    updates, holding = sum(s.outdated for s in sentences), sum(not s.outdated for s in sentences)
    assert abs(updates / holding - 0.4) < 5 * (0.24 / holding) ** 0.5
    assert sum(s.pronoun for s in sentences) > 200


def test_every_word_of_held_out_stories_is_seen_in_training_joined_to_most_of_the_other_side():
    for kind in STATEMENT_KINDS:
        for subject in kind.subjects:
            assert sum(not is_heldout_pair(kind, subject, value) for value in kind.values) == len(kind.values) * 7 / 8


def test_held_out_batches_score_the_answer_words_and_training_batches_the_answers():
    drawn, (inputs, targets, scored) = TASK.stories(9, seeded(3), "heldout"), TASK.sample(9, seeded(3), "heldout")
    story, position, token = scored_questions(drawn)
    assert int(scored.sum()) == len(token)
    assert bool(scored[story, position - 1].all())
    assert torch.equal(targets[story, position - 1], token)
    assert torch.equal(inputs[story, position], token)
    drawn, batch = TASK.stories(9, seeded(3)), FactsTask(2, 7, 120, whole_share=0.0).sample(9, seeded(3))
    for row, story in enumerate(drawn):
        wanted = [position - 1 for q in story.questions for position in range(q.answer_start, q.end)]
        assert batch.scored[row].nonzero()[:, 0].tolist() == wanted


def test_of_a_whole_story_every_token_is_predicted_but_padding():
    drawn, batch = TASK.stories(9, seeded(4)), FactsTask(2, 7, 120, whole_share=1.0).sample(9, seeded(4))
    for row, story in enumerate(drawn):
        assert batch.scored[row].nonzero()[:, 0].tolist() == list(range(story.n_tokens - 1))
        assert set(batch.inputs[row, story.n_tokens :].tolist()) <= {word_tokenizer().pad_token_id}


@pytest.mark.unhooked
def test_two_hand_made_guessers_reach_the_stated_chance():
    task = make_task("facts", min_facts=6, max_facts=6, length=160)
    drawn = task.stories(1500, seeded(5), "heldout")
    shares = answer_shares(build_model(task, dict(n_layers=1, d_model=16, d_head=8)), drawn[:8])
    assert shares["n_facts"] == 6 and shares["n_answers"] == len(scored_questions(drawn[:8])[0])
    generator, hits, n = seeded(6), [0, 0], 0
    expected = answer_shares_of_chance(drawn)
    for story in drawn:
        for question in story.questions[:6]:
            values = question.fact.kind.values
            named = [s.fact.value for s in story.sentences if s.fact.kind == question.fact.kind]
            for i, choices in enumerate((values, named)):
                hits[i] += choices[int(torch.randint(len(choices), (), generator=generator))] == question.fact.value
            n += 1
    for hit, chance in zip(hits, expected, strict=True):
        assert abs(hit / n - chance) < 5 * (chance * (1 - chance) / n) ** 0.5


def answer_shares_of_chance(drawn):
    blind = answer_shares(Blank(), drawn, batch_size=len(drawn))
    return blind["guess"], blind["guess_in_story"]


class Blank:
    """A stand-in for a model: always the same answer."""

    class cfg:
        attention = "softmax"

    def __call__(self, tokens):
        return torch.nn.functional.one_hot(torch.full_like(tokens, 7), 8)


@pytest.mark.unhooked
def test_accuracy_is_one_for_a_perfect_model_and_chance_for_a_guessing_one():
    class Knows(Blank):
        def __call__(self, tokens):
            return torch.nn.functional.one_hot(tokens.roll(-1, dims=1), TASK.d_input)

    same = [story for story in DRAWN["plain", "train"] if len(story.sentences) == 4]
    assert len(same) > 5
    shares = answer_shares(Knows(), same, batch_size=3)
    assert shares["with_story"] == shares["without_story"] == 1.0 and shares["converted"] is None
    assert answer_shares(Blank(), same)["with_story"] == 0.0
    assert 1 / 32 < shares["guess"] < 1 / 16 and 1 / 4 <= shares["guess_in_story"] <= 1 / 2


def test_a_converted_story_gives_the_same_answers():
    task = FactsTask(min_facts=3, max_facts=3, length=90)
    model = build_model(task, dict(n_layers=2, d_model=16, d_head=8, attention="linear", kv_shift=dict(window=2)))
    shares = answer_shares(model, task.stories(20, seeded(7), "heldout"), batch_size=6)
    assert shares["converted"] == shares["with_story"]


def test_the_model_of_the_task_reads_and_writes_text():
    model = build_model(TASK, dict(n_layers=1, d_model=16, d_head=8))
    assert isinstance(model, HookedKVTransformer)
    assert model.to_str_tokens("Where is the kite?") == ["<|bos|>", " Where", " is", " the", " kite", "?"]
    text = model.generate("Where is the kite?", max_new_tokens=3, do_sample=False, verbose=False)
    assert text.startswith(" Where is the kite?") and len(text) > len(" Where is the kite?")
    with pytest.warns(UserWarning, match="lacks 'dragon'"):
        assert model.to_tokens("Where is the dragon?")[0, 4] == model.tokenizer.unk_token_id


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_story_of_two_hops_tells_both_halves_of_every_answer(split):
    seen = Counter()
    for story in DRAWN["nested", split]:
        assert {len(sentence.words) for sentence in story.sentences} == {7}  # any can stand in another's place
        for question in story.questions:
            inner, outer = story.sentences[question.sentence], story.sentences[question.origins[0]]
            seen[len(question.origins)] += 1
            if len(question.origins) == 2:
                assert question.origins[0] < question.origins[1] == question.sentence
                assert inner.fact.value == outer.fact.subject
        for position, room in notes(story):
            inner = next(s for s in story.sentences if s.start <= position < s.start + len(s.words))
            outer = next(s for s in story.sentences if s.fact.subject == inner.fact.value)
            assert position == inner.value_position and room == outer.fact.value and outer.start < inner.start
    assert seen[1] > 100 and seen[2] > 100


def test_notes_are_predicted_in_training_only():
    batch = NESTED.sample(16, seeded(3))
    held = NESTED.sample(16, seeded(3), "heldout")
    plain = make_task("facts", **{**NESTED.settings(), "notes": False}).sample(16, seeded(3))
    assert torch.equal(batch.inputs, plain.inputs) and int(batch.scored.sum()) > int(plain.scored.sum())
    rooms = {word_tokenizer(hops=True).get_vocab()["\u2581" + room] for room in ROOM.values}
    assert set(batch.targets[batch.scored & ~plain.scored].tolist()) <= rooms
    first_question = (held.inputs == word_tokenizer(hops=True).get_vocab()["?"]).long().argmax(dim=1)
    assert all(not held.scored[row, :end].any() for row, end in enumerate(first_question.tolist()))
