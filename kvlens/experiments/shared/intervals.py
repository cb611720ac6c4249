"""95 % intervals of shares, such as an accuracy, from answers that come in groups (several per sequence, or per story).

Wilson's interval for a share p of n independent answers,

    (p + z^2 / 2n  +-  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),        z = 1.96,

stays inside 0..1 and has a width even at p = 0 and p = 1. Answers of one group are alike, so n is not their number, but the
number of independent answers whose share would vary as much: n = p (1 - p) / Var(p), with the variance between groups (Kish
1965).
"""

import math

import pandas as pd

Z = 1.96


def share_interval(is_right: pd.Series, group: pd.Series) -> tuple[float, float]:
    """The lower and upper end of the interval of the share of True in ``is_right``.

    Args:
        is_right: one value for each answer.
        group: the group of each answer, with the same index. n is at least the number of groups and at most that of answers;
            where all answers are equal and so have no variance, it is the number of groups.
    """
    sums = is_right.astype(float).groupby(group).agg(["sum", "size"])
    n_answers, n_groups, share = len(is_right), len(sums), float(is_right.mean())
    apart = ((sums["sum"] - share * sums["size"]) ** 2).sum()
    variance = apart * n_groups / max(1, n_groups - 1) / n_answers**2
    n: float = n_groups
    if 0 < share < 1:
        n = n_answers if variance == 0 else min(n_answers, max(n_groups, share * (1 - share) / variance))
    center, half = share + Z**2 / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, (center - half) / (1 + Z**2 / n)), min(1.0, (center + half) / (1 + Z**2 / n))
