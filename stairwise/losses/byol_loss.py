"""BYOL (Grill et al. 2020): predict the target embedding of the other view, which carries no gradient."""

from torch import Tensor, nn

from stairwise.losses.views import of_views


@of_views
def byol(p: Tensor, target: Tensor) -> Tensor:
    r"""L = mean_i (2 − 2 cos(p_i, target_i)); no gradient flows into the target.

    The published loss is the sum of both directions: byol(p_a, t_b) + byol(p_b, t_a).

    Arguments:
        p: (N, d) predictions from one view.
        target: (N, d) embeddings of the other view by the target network.

    Example:
        >>> import torch
        >>> byol(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, -1.0]]))
        tensor(2.)
    """
    return (2 - 2 * nn.functional.cosine_similarity(p, target.detach())).mean()


class BYOL(nn.Module):
    """`byol` as a module."""

    def forward(self, p: Tensor, target: Tensor) -> Tensor:
        return byol(p, target)
