"""Arithmetic: the text is read back and worked out by a person's method, equation by equation."""

import pytest
import torch
from task_checks import assert_frequency, seeded

from kvlens.tasks import ArithmeticTask

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def whole_text(task: ArithmeticTask, batch, row: int) -> str:
    """The sequence with its last token, which only the targets hold, without padding."""
    tokens = torch.cat([batch.inputs[row], batch.targets[row, -1:]])
    return task.tokens_as_text(tokens).rstrip("_ ")


def read_problem(text: str) -> tuple[dict[str, list[str]], str, str]:
    """Equations by name (x, op, y), the name asked for, and the solution's text."""
    problem, rest = text.split(" ? ")
    asked, solution = rest.split(" : ")
    equations = {}
    for equation in problem.removesuffix(" ;").split(" ; "):
        name, definition = equation.split(" = ")
        equations[name] = definition.split()
    return equations, asked, solution


def solve(equations: dict[str, list[str]], name: str, modulus: int, steps: list[str]) -> int:
    """The value of a variable; writes a step when it is known, each variable once."""
    x, op, y = equations[name]
    values = [int(v) if v.isdigit() else solve(equations, v, modulus, steps) for v in (x, y)]
    result = OPERATIONS[op](*values) % modulus
    step = f"{name} = {values[0]} {op} {values[1]} = {result}"
    if step not in steps:
        steps.append(step)
    return result


@pytest.mark.parametrize("solution", [True, False])
@pytest.mark.parametrize("scored_part", ["solution", "answer"])
def test_the_solution_is_what_working_it_out_gives_and_its_part_is_scored(solution, scored_part):
    task = ArithmeticTask(max_ops=5, modulus=7, n_names=9, solution=solution, scored_part=scored_part)
    batch = task.sample(60, seeded(0))
    n_seen = set()
    for row in range(60):
        equations, asked, written = read_problem(whole_text(task, batch, row))
        steps: list[str] = []
        answer = solve(equations, asked, 7, steps)
        n_seen.add(len(equations))
        assert written == (" ; ".join(steps) if solution else str(answer))
        assert len(steps) == len(equations)  # every equation is needed
        expected = written if scored_part == "solution" else written.split()[-1]
        assert task.tokens_as_text(batch.targets[row][batch.scored[row]]) == expected
    assert n_seen == {1, 2, 3, 4, 5}


def test_held_out_problems_have_exactly_the_requested_operations():
    task = ArithmeticTask(max_ops=2, test_ops=6, modulus=5)
    train, heldout = task.sample(30, seeded(2)), task.sample(30, seeded(2), "heldout")
    assert {len(read_problem(whole_text(task, train, row))[0]) for row in range(30)} == {1, 2}
    assert {len(read_problem(whole_text(task, heldout, row))[0]) for row in range(30)} == {6}
    assert heldout.inputs.shape[1] == task.n_positions == task.question_length(6) + task.solution_length(6) - 1
    question = heldout.inputs[:, : task.question_length(6)]
    assert all(task.tokens_as_text(row).endswith(":") for row in question)


def test_numbers_of_operations_orders_and_answers_have_no_preference():
    task = ArithmeticTask(max_ops=3, modulus=5, n_names=4, scored_part="answer", solution=False)
    batch = task.sample(4000, seeded(3))
    n_ops = (batch.inputs == 2).sum(dim=1)  # one ";" an equation
    assert_frequency(n_ops[:, None] == torch.arange(1, 4), 1 / 3)
    assert_frequency(batch.targets[batch.scored][:, None] == len("_=;?:+-*") + torch.arange(5), 1 / 5)
    assert_frequency(batch.inputs[:, :1] == batch.inputs.new_tensor([13, 14, 15, 16]), 1 / 4)
    of_two = batch.inputs[n_ops == 2]
    asked_first = of_two[:, 0] == of_two[:, task.question_length(2) - 2]
    assert_frequency(asked_first[:, None], 1 / 2)


def test_both_orders_of_operands_and_all_operators_occur():
    task = ArithmeticTask(max_ops=4, modulus=5)
    batch = task.sample(200, seeded(4), "heldout")
    kinds = set()
    for row in range(200):
        for x, op, y in read_problem(whole_text(task, batch, row))[0].values():
            kinds.add(("n" if x.isdigit() else "v") + op + ("n" if y.isdigit() else "v"))
            assert op != "*" or not (x.isalpha() and y.isalpha())
    assert kinds == {f"{x}{op}{y}" for op in "+-*" for x in "nv" for y in "nv"} - {"v*v"}


TABLE = ArithmeticTask(modulus=5, n_names=4)


def tokens_of(text):
    """The inverse of `tokens_as_text`, for modulus 5 and names a to d."""
    vocabulary = {TABLE.tokens_as_text(torch.tensor([token])): token for token in range(TABLE.d_vocab)}
    return torch.tensor([[vocabulary[word] for word in text.split()]])


@pytest.mark.parametrize(
    ("solution", "answers"),
    [
        ("a = 1 + 2 = 3 ; b = 3 - 1 = 2", True),
        ("b = 3 - 1 = 2 ; a = 1 + 2 = 3", True),  # the first step answers, and more follow
        ("a = 1 + 2 = 0 ; b = 4 * 4 = 2", True),  # only the requested variable counts, not how it was derived
        ("b = 3 - 1 = 4 ; b = 3 - 1 = 2", True),
        ("a = 1 + 2 = 3 ; b = 3 - 1 = 4", False),
        ("a = 1 + 2 = 2 ; c = 3 - 1 = 2", False),  # the value, of another variable
        ("a = b = 3 - 1 = 2 ; a = 1 + 2", False),  # no step of its own
        ("b = 3 - 1 - 2 ; a = 1 + 2 = 3", False),  # no result
    ],
)
def test_some_step_answers_what_is_asked(solution, answers):
    written, (asked, two) = tokens_of(solution), tokens_of("b 2")[0]
    assert TABLE.some_step_answers(written, asked[None], two[None]).tolist() == [answers]
    both = torch.cat([written, tokens_of("b = 2 * 1 = 2 ; a = 1 + 2 = 3")])
    assert TABLE.some_step_answers(both, asked.expand(2), two.expand(2)).tolist() == [answers, True]
