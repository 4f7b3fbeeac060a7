"""Policy losses by name, and the terms beside them.

The loss of a token is ``L_t + kl_coef kl_t - entropy_coef H_t``; an engine weighs the tokens (``aggregate.py``) and sums them.
A loss is a function of the type :data:`hybridrl.algos.loss.tokens.PolicyLoss`: one small file and one line in the table
below, or a file of the user's that the configuration names.
"""

from __future__ import annotations

from pathlib import Path

from hybridrl.algos.loss.cispo import cispo
from hybridrl.algos.loss.clip import clip, dual_clip
from hybridrl.algos.loss.gmpo import gmpo
from hybridrl.algos.loss.gspo import gspo
from hybridrl.algos.loss.sapo import sapo
from hybridrl.algos.loss.tokens import PolicyLoss, PolicyTokens, TokenLoss
from hybridrl.config.algorithm import PolicyLossConfig
from hybridrl.config.choices import PolicyLossKind
from hybridrl.config.user_function import FunctionReference, load_function

__all__ = ["PolicyLoss", "PolicyLossConfig", "PolicyTokens", "TokenLoss", "make_policy_loss"]

_LOSSES: dict[PolicyLossKind, PolicyLoss] = {
    PolicyLossKind.CLIP: clip,
    PolicyLossKind.DUAL_CLIP: dual_clip,
    PolicyLossKind.GSPO: gspo,
    PolicyLossKind.CISPO: cispo,
    PolicyLossKind.SAPO: sapo,
    PolicyLossKind.GMPO: gmpo,
}


def make_policy_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return the loss that the configuration names; a user's file is run."""
    if config.path is not None and config.name is not None:
        return load_function(FunctionReference(Path(config.path), config.name))
    return _LOSSES[config.kind]
