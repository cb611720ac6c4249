"""Chains of small sums in shuffled order: grade-school arithmetic without the words.

A problem of n operations defines n variables, each by one operation modulo a prime:

    v_0 = number op number          v_t = v_{t-1} op (a number, or one of v_0 ... v_{t-2})          op: + - *

Every variable depends on the one before, so the last one requires all n operations. The two operands are in random order, as
are the equations, and the names are random letters. With modulus 7 and n = 3 a sequence reads

    b = a - 2 ; a = 3 + 6 ; k = b + a ; ? k :   a = 3 + 6 = 2 ; b = 2 - 2 = 0 ; k = 0 + 2 = 2
    |--- the problem, then the question ----|   |------------- the solution -------------|  answer: its last number

The solution repeats the equations in the order in which they can be solved, with values substituted for variables. Without it
(``solution=False``) only the answer follows the question. Shorter sequences are padded with "_" on the right.

A product always has a constant other than 0 as a factor: modulo a prime such a product takes every value equally often, so no
answer is more likely than another. (Products of two variables would drift towards 0.)

Compared with iGSM, on which it is modeled, it lacks the sentences, the hierarchy of things and the equations that do not
matter.

Source: Ye, Xu, Li, Allen-Zhu 2024, Physics of Language Models 2.1 (iGSM: train up to some number of operations, test on exactly
more); KVSA app. I.
"""

import string
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.errors import KVLensError
from kvlens.tasks.task import Batch, Task, draw_distinct

SIGNS = ("_", "=", ";", "?", ":", "+", "-", "*")
PAD, EQUALS, END, ASK, COLON, PLUS = range(6)
N_OPERATORS, TIMES = 3, 2
FIRST_NUMBER = len(SIGNS)
NAMES = string.ascii_letters
EQUATION_LENGTH = 6  # v = x + y ;
QUESTION_LENGTH = 3  # ? v :
STEP_LENGTH = 8  # v = 1 + 2 = 3 ;

ABSENT, QUESTION, SOLUTION, ANSWER = range(4)  # the role of a token; the answer belongs to the solution


@dataclass(frozen=True)
class _Problem:
    """A batch of chains as tokens, in the order of the chain; columns from a row's ``n_ops`` on are unused."""

    n_ops: Int[Tensor, " batch"]
    name: Int[Tensor, "batch op"]
    operator: Int[Tensor, "batch op"]
    operand: Int[Tensor, "batch op 2"]
    """Operands as the problem has them: numbers and names."""
    operand_value: Int[Tensor, "batch op 2"]
    """Operands as the solution has them: numbers."""
    value: Int[Tensor, "batch op"]

    def in_use(self) -> Bool[Tensor, "batch op"]:
        """Return which columns are in use."""
        return torch.arange(self.name.shape[1]) < self.n_ops[:, None]

    def is_last(self) -> Bool[Tensor, "batch op"]:
        """Return which column holds the variable that the question asks for."""
        return torch.arange(self.name.shape[1]) == self.n_ops[:, None] - 1


@dataclass(frozen=True)
class ArithmeticTask(Task):
    """Work out a variable that is defined by a chain of equations.

    Attributes:
        max_ops: training problems have 1 to max_ops operations, uniformly distributed.
        test_ops: held-out problems have exactly this many; 0 for the same as in training.
        modulus: an odd prime.
        n_names: number of letters available as variable names, a-z then A-Z.
        solution: write the steps between question and answer.
        scored_part: "solution" scores every token after the question, "answer" only the last.
    """

    name: ClassVar[str] = "arithmetic"

    max_ops: Annotated[int, Within(1)] = 4
    test_ops: Annotated[int, Within(0)] = 0
    modulus: Annotated[int, Within(3)] = 7
    n_names: Annotated[int, Within(1)] = 26
    solution: bool = True
    scored_part: Literal["solution", "answer"] = "solution"

    def __post_init__(self):
        super().__post_init__()
        if self.modulus > 97 or any(self.modulus % d == 0 for d in range(2, self.modulus)):
            raise KVLensError(f"task 'arithmetic': modulus must be an odd prime of at most 97, got {self.modulus}")
        if not self._most_ops <= self.n_names <= len(NAMES):
            raise KVLensError(
                f"task 'arithmetic': {self._most_ops} operations need as many names of the {len(NAMES)} letters, got "
                f"n_names={self.n_names}"
            )

    @property
    def n_positions(self) -> int:
        return self.question_length(self._most_ops) + self.solution_length(self._most_ops) - 1

    @property
    def d_input(self) -> int:
        return self._first_name + self.n_names

    @property
    def chance(self) -> float:
        return 1 / self.modulus

    @checked
    def question_length(self, n_ops: int) -> int:
        """Return how many tokens come before the solution: the prompt for a model that writes the solution itself."""
        return EQUATION_LENGTH * n_ops + QUESTION_LENGTH

    @checked
    def solution_length(self, n_ops: int) -> int:
        """Return how many tokens come after the question, the answer (the last) included."""
        return STEP_LENGTH * n_ops - 1 if self.solution else 1

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        self.check_drawable(batch_size, generator, split)
        if split == "heldout" and self.test_ops:
            n_ops = torch.full((batch_size,), self.test_ops)
        else:
            n_ops = torch.randint(1, self.max_ops + 1, (batch_size,), generator=generator)
        problem = self._draw_problem(n_ops, generator)
        tokens, roles = self._write(problem, generator)
        first_scored = SOLUTION if self.scored_part == "solution" else ANSWER
        return Batch(tokens[:, :-1], tokens[:, 1:], roles[:, 1:] >= first_scored)

    @checked
    def tokens_as_text(self, tokens: Int[Tensor, " pos"]) -> str:
        """Return one sequence as text, a space between tokens."""
        table = [*SIGNS, *map(str, range(self.modulus)), *NAMES[: self.n_names]]
        return " ".join(table[token] for token in tokens.tolist())

    @checked
    def some_step_answers(
        self, solution: Int[Tensor, "batch pos"], asked: Int[Tensor, " batch"], answer: Int[Tensor, " batch"]
    ) -> Bool[Tensor, " batch"]:
        """Whether any step of a written solution, such as "k = 0 + 2 = 2", gives the requested variable its correct value.

        KVSA scores iGSM in this way (app. I): steps that are wrong, missing or after the answer do not matter.

        Args:
            solution: the tokens written after the question, at least one step long.
            asked: token of the variable.
            answer: token of its value.
        """
        step = solution.unfold(1, STEP_LENGTH - 1, 1)  # [batch start token]
        begins = torch.cat([torch.full_like(asked[:, None], END), solution], dim=1)[:, : step.shape[1]] == END
        is_equation = (step[..., 1] == EQUALS) & (step[..., 5] == EQUALS)
        return (begins & is_equation & (step[..., 0] == asked[:, None]) & (step[..., 6] == answer[:, None])).any(dim=1)

    @property
    def _most_ops(self) -> int:
        return max(self.max_ops, self.test_ops)

    @property
    def _first_name(self) -> int:
        return FIRST_NUMBER + self.modulus

    def _draw_problem(self, n_ops: Int[Tensor, " batch"], generator: torch.Generator) -> _Problem:
        """Draw names, operators and operands, and evaluate the chains."""
        shape = (len(n_ops), self._most_ops)
        names = draw_distinct(self.n_names, *shape, generator) + self._first_name
        first_number = torch.randint(self.modulus, (len(n_ops), 1), generator=generator)
        operator = torch.randint(N_OPERATORS, shape, generator=generator)
        number = torch.randint(self.modulus, shape, generator=generator)
        factor = torch.randint(1, self.modulus, shape, generator=generator)
        number = torch.where(operator == TIMES, factor, number)
        uses_variable = (torch.rand(shape, generator=generator) < 0.5) & (operator != TIMES)
        uses_variable[:, :2] = False  # the only variable so far is the one before
        earlier = (torch.rand(shape, generator=generator) * (torch.arange(shape[1]) - 1).clamp(min=1)).long()
        is_swapped = torch.rand(shape, generator=generator) < 0.5

        values = [first_number.squeeze(1)]  # then v_0, v_1, ..., so v_j is values[j + 1]
        place = torch.where(uses_variable, earlier + 1, 0)
        operand_values = []
        for t in range(shape[1]):  # a chain: each operation depends on the one before
            variable = torch.stack(values, dim=1).gather(1, place[:, t : t + 1]).squeeze(1)
            other = torch.where(uses_variable[:, t], variable, number[:, t])
            operand_values.append(_in_order(values[-1], other, is_swapped[:, t]))
            values.append(self._apply(operator[:, t], operand_values[-1]))

        chained = torch.cat([first_number + FIRST_NUMBER, names[:, :-1]], dim=1)
        other = torch.where(uses_variable, names.gather(1, earlier), number + FIRST_NUMBER)
        return _Problem(
            n_ops=n_ops,
            name=names,
            operator=operator + PLUS,
            operand=_in_order(chained, other, is_swapped),
            operand_value=torch.stack(operand_values, dim=1) + FIRST_NUMBER,
            value=torch.stack(values[1:], dim=1) + FIRST_NUMBER,
        )

    def _apply(self, operator: Int[Tensor, " batch"], operands: Int[Tensor, "batch 2"]) -> Int[Tensor, " batch"]:
        x, y = operands.unbind(1)
        results = torch.stack([x + y, x - y, x * y], dim=1) % self.modulus
        return results.gather(1, operator[:, None]).squeeze(1)

    def _write(
        self, problem: _Problem, generator: torch.Generator
    ) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
        """Return the tokens and their roles, padding (role ABSENT) on the right."""
        parts = [_write_equations(problem, generator), _write_question(problem), _write_steps(problem, self.solution)]
        tokens = torch.cat([part.flatten(1) for part, _ in parts], dim=1)
        roles = torch.cat([role.flatten(1) for _, role in parts], dim=1)
        # A stable sort moves absent tokens to the right and keeps the order of the others.
        left_aligned = (roles == ABSENT).long().argsort(dim=1, stable=True)[:, : self.n_positions + 1]
        return torch.where(roles == ABSENT, PAD, tokens).gather(1, left_aligned), roles.gather(1, left_aligned)


def _write_equations(problem: _Problem, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The equations in random order, tokens and roles [batch op EQUATION_LENGTH]."""
    left, right = problem.operand.unbind(2)
    tokens = _columns(problem.name, EQUALS, left, problem.operator, right, END)
    roles = torch.where(problem.in_use()[:, :, None], QUESTION, ABSENT).expand_as(tokens)
    order = torch.rand(problem.name.shape, generator=generator).argsort(dim=1)[:, :, None].expand_as(tokens)
    return tokens.gather(1, order), roles.gather(1, order)


def _write_question(problem: _Problem) -> tuple[Tensor, Tensor]:
    """The question, tokens and roles [batch QUESTION_LENGTH]."""
    tokens = _columns(ASK, problem.name[problem.is_last()], COLON)
    return tokens, torch.full_like(tokens, QUESTION)


def _write_steps(problem: _Problem, solution: bool) -> tuple[Tensor, Tensor]:
    """The steps of the solution, or the answer alone, tokens and roles [batch op STEP_LENGTH]."""
    left, right = problem.operand_value.unbind(2)
    tokens = _columns(problem.name, EQUALS, left, problem.operator, right, EQUALS, problem.value, END)
    roles = torch.where(problem.in_use()[:, :, None], SOLUTION if solution else ABSENT, ABSENT).repeat(1, 1, STEP_LENGTH)
    roles[problem.is_last()] = torch.tensor([SOLUTION if solution else ABSENT] * 6 + [ANSWER, ABSENT])
    return tokens, roles


def _in_order(
    first: Int[Tensor, "*shape"], second: Int[Tensor, "*shape"], is_swapped: Bool[Tensor, "*shape"]
) -> Int[Tensor, "*shape 2"]:
    """The two next to each other, in reverse order where swapped."""
    return torch.stack([torch.where(is_swapped, second, first), torch.where(is_swapped, first, second)], dim=-1)


def _columns(*columns: Tensor | int) -> Tensor:
    """Stack columns along a new last axis; an integer stands for a column filled with it."""
    shape = next(column.shape for column in columns if isinstance(column, Tensor))
    return torch.stack([c if isinstance(c, Tensor) else torch.full(shape, c) for c in columns], dim=-1)
