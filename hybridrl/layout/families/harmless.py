"""Fields of a ``config.json`` that do not change what a trained or sampled model computes.

Every other field must be read by the family that declares the model; one that is not is refused, so that nothing of a
checkpoint is ignored unseen.
"""

from __future__ import annotations

_BOOKKEEPING = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Sharding and speed of other implementations.
_EXECUTION = {"ep_size", "experts_implementation", "pretraining_tp"}
# Of training from scratch: initial values, dropout (never used here) and losses that balance the experts.
_PRETRAINING = {
    "attention_dropout",
    "classifier_dropout",
    "aux_loss_alpha",
    "embd_pdrop",
    "hidden_dropout",
    "initial_context_length",
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
}

HARMLESS = frozenset(_BOOKKEEPING | _EXECUTION | _PRETRAINING)
