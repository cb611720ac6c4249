"""DualLayer: a head and the MLP after it as one dual model (DUAL th. B.1).

In a real block, for one query and with the norm's scale fixed at its value there, the residual stream after the block is an
affine function of a head's output:

    x_out = z_h G + b        G = W_O M        b = x M + c W_FFN + b_FFN + r        M = I + N W_FFN

so the labels become v_j G and the initial weight G^T W_0 (without the residual, M = N W_FFN). x is the rest of the stream: the
residual, the other heads and b_O; N and c are the norm's matrix and shift, and the MLP under the query's mask has W_FFN = W_1
diag(mask) W_2 and b_FFN = b_1 diag(mask) W_2 + b_2. An activation that is not piecewise linear has its slopes in place of the
mask, and a remainder r, which belongs to b.

None of it is read off the block's output, so that :meth:`DualLayer.equivalence_error` compares two numbers.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlens.checks import checked
from kvlens.components import KVBlock
from kvlens.dual.head_inputs import TokenRow, check_index
from kvlens.dual.model import DualModel
from kvlens.errors import KVLensError
from kvlens.model import HookedKVTransformer, heads_per_layer

PIECEWISE_LINEAR = ("relu", "leaky_relu")


class DualLayer:
    """The dual model of one head and the MLP after it, at one query.

    Attributes:
        head: the head's own dual model.
        label_map: G: a label v_j of the head becomes v_j G.
        bias: b.
        output: the model's residual stream after the block at the query (or its MLP's output, without the residual).
        remainder: size of r, the part of b that a piecewise linear activation would not have, relative to the MLP's output; 0
            up to rounding for ReLU.
        singular_values: singular values of W_V N' W_FFN, the map from a normalized token to its label after the MLP, largest
            first.
    """

    head: DualModel
    label_map: Float[Tensor, "d_head d_model"]
    bias: Float[Tensor, " d_model"]
    output: Float[Tensor, " d_model"]
    remainder: float
    singular_values: Float[Tensor, " value"]

    def __init__(self, head: DualModel, label_map: Tensor, bias: Tensor, output: Tensor, remainder: float, values: Tensor):
        self.head, self.label_map, self.bias = head, label_map, bias
        self.output, self.remainder, self.singular_values = output, remainder, values

    @classmethod
    @checked
    @torch.no_grad()
    def from_layer(
        cls,
        model: HookedKVTransformer,
        tokens: TokenRow,
        layer: int,
        head: int,
        query_pos: int = -1,
        n_demonstrations: int | None = None,
        *,
        residual: bool = True,
        exact: bool = False,
    ) -> "DualLayer":
        """Fold a block's norm and MLP, as they act at the query, into labels and bias.

        Args:
            model, tokens, layer, head, query_pos, n_demonstrations: as for :meth:`DualModel.from_head`.
            residual: whether the output is the residual stream after the block, or only the MLP's output.
            exact: raise an error for activations that are not piecewise linear.

        Raises:
            KVLensError: as :meth:`DualModel.from_head`; a block without an MLP after its attention, or with norms after
                either; ``exact`` with an activation that is not piecewise linear.
        """
        layer = check_index("layer", layer, model.cfg.n_layers)
        head = check_index("head", head, heads_per_layer(model)[layer])
        _check_block(model, exact)
        dual = DualModel.from_head(model, tokens, layer, head, query_pos, n_demonstrations)
        query = check_index("query_pos", query_pos, len(tokens))
        block: KVBlock = model.blocks[layer]
        read = _read_block(model, tokens, layer, query)
        W_O = block.attn.W_O.double()
        others = read["hook_z"].index_fill(0, torch.tensor(head, device=W_O.device), 0.0)
        rest = read["hook_resid_pre"] + torch.einsum("hd,hdm->m", others, W_O) + block.attn.b_O.double()
        norm_map, shift = _norm_map(block, read.get("hook_scale"), rest)
        weight, mlp_bias, remainder = _tangent(block.mlp, read["hook_resid_mid"] @ norm_map + shift)
        through = norm_map @ weight
        whole = through + torch.eye(len(rest), dtype=rest.dtype, device=rest.device) if residual else through
        bias = rest @ whole + shift @ weight + mlp_bias + remainder
        values = torch.linalg.svdvals(block.attn.W_V[head].double() @ W_O[head] @ through)
        share = float(remainder.norm() / read["hook_mlp_out"].norm())
        output = read["hook_resid_post" if residual else "hook_mlp_out"]
        return cls(dual, W_O[head] @ whole, bias, output, share, values)

    @property
    def labels(self) -> Float[Tensor, "demo d_model"]:
        """v_j G of the demonstrations."""
        return self.head.labels @ self.label_map

    @property
    def rank(self) -> int:
        """The numerical rank of W_V N W_FFN: singular values above the largest one times its size times eps."""
        largest, n = float(self.singular_values[0]), self.label_map.shape[1]
        return int((self.singular_values > largest * n * torch.finfo(torch.float64).eps).sum())

    @checked
    def step(self, eta: float = 1.0, alpha: float = 0.0) -> "DualLayer":
        """One step of the head's dual model; returns itself. b is not trained."""
        self.head.step(eta, alpha)
        return self

    def predict(self) -> Float[Tensor, " d_model"]:
        """f(q) = G^T W phi(q) + b: after one step, the block's output."""
        return self.head.predict() @ self.label_map + self.bias

    def equivalence_error(self) -> float:
        """|f(q) after one step - the block's output| / |the block's output|."""
        after = self.head.after_one_step() @ self.label_map + self.bias
        return float((after - self.output).norm() / self.output.norm())


def _check_block(model: HookedKVTransformer, exact: bool) -> None:
    cfg = model.cfg
    refused = [
        (cfg.attn_only, "the model has no MLPs"),
        (cfg.parallel_attn_mlp, "its MLPs run in parallel with the attention, not after it"),
        (
            any(block.norm_behind("ln1") is not None for block in model.blocks),  # type: ignore[operator]
            "its blocks have norms after attention and MLP",
        ),
        (cfg.num_experts is not None, "its MLPs are mixtures of experts"),
    ]
    for is_refused, reason in refused:
        if is_refused:
            raise KVLensError(f"DualLayer: th. B.1 folds the MLP after an attention layer into its labels, but {reason}")
    if exact and (cfg.act_fn not in PIECEWISE_LINEAR or cfg.gated_mlp):
        raise KVLensError(
            f"DualLayer: exact=True needs a piecewise linear MLP ({', '.join(PIECEWISE_LINEAR)}, not gated), but this one "
            f"has {cfg.act_fn!r}{', gated' if cfg.gated_mlp else ''}; exact=False uses its tangent at the query"
        )


def _read_block(model: HookedKVTransformer, tokens: Tensor, layer: int, query: int) -> dict[str, Tensor]:
    """The heads' outputs, the stream before, between and after, the norm's scale and the MLP's output, at the query."""
    names = [f"blocks.{layer}.{name}" for name in ("hook_resid_pre", "attn.hook_z", "hook_resid_mid", "hook_mlp_out")]
    names += [f"blocks.{layer}.hook_resid_post"]
    if model.cfg.normalization_type is not None:
        names.append(f"blocks.{layer}.ln2.hook_scale")
    text = tokens[None].to(model.W_E.device)
    _, cache = model.run_with_cache(
        text, attention_mask=torch.ones_like(text), names_filter=names, stop_at_layer=layer + 1, return_type=None
    )
    return {name.rsplit(".", 1)[1]: cache[name][0, query].double() for name in names}


def _norm_map(block: Any, scale: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix of the norm with its scale fixed, and what the norm adds."""
    eye = torch.eye(len(like), dtype=like.dtype, device=like.device)
    if scale is None:
        return eye, torch.zeros_like(like)
    centered = eye - 1.0 / len(like) if getattr(block.ln2, "centers", False) else eye
    weight = block.ln2.w.double() if hasattr(block.ln2, "w") else torch.ones_like(like)
    return centered / scale * weight, block.ln2.b.double() if hasattr(block.ln2, "b") else torch.zeros_like(like)


def _tangent(mlp: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W_FFN (rows: inputs), b_FFN, and the remainder, which a piecewise linear MLP would not have.

    A piecewise linear MLP is homogeneous in its input and biases together, so its derivative along them is its output.
    """
    with torch.no_grad():
        parameters = {name: p.detach().double() for name, p in mlp.named_parameters()}

    def run(inputs: Tensor, biases: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(mlp, {**parameters, **biases}, (inputs[None, None],))[0, 0]

    biases = {name: p for name, p in parameters.items() if name.startswith("b_")}
    jacobian = torch.func.jacrev(run)(x, biases)
    output, along_both = torch.func.jvp(run, (x, biases), (x, biases))[:2]
    _, along_biases = torch.func.jvp(lambda moved: run(x, moved), (biases,), (biases,))[:2]
    return jacobian.T, along_biases, output - along_both
