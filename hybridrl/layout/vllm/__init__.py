"""Where a vLLM worker keeps the weights of a model, declared without a process.

Runs use the map that ``engines/vllm/learn.py`` learns from vLLM's own loaders; this one serves planning before anything
starts, and a test holds the two equal. Names and shapes are those of the load format, before vLLM's post-processing. One file
per noun: ``layout`` (the choices), ``placement`` (which experts and layers a worker has), ``worker`` (the whole map),
``attention`` and ``mlp`` (its parts), ``slices`` (how a tensor is cut).
"""

from __future__ import annotations

from hybridrl.layout.vllm.layout import VllmLayout
from hybridrl.layout.vllm.placement import ExpertPlacement, linear_experts
from hybridrl.layout.vllm.worker import vllm_shard_map

__all__ = ["ExpertPlacement", "VllmLayout", "linear_experts", "vllm_shard_map"]
