"""Reads the rotary embedding from ``rope_parameters`` (transformers 5), or from ``rope_theta`` and ``rope_scaling``.

Source: transformers ``modeling_rope_utils.py`` (fields and defaults).
"""

from __future__ import annotations

from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.rope import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling, yarn_mscale


def read_rope(fields: HfFields, default_fraction: float, default_scaling: RopeScaling | None) -> Rope:
    """Read a rotary embedding.

    Raises:
        LayoutError: For a kind that is not supported, and for parameters that its kind does not know.
    """
    fields.ignore("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    sections = [found for name in ("rope_parameters", "rope_scaling") if (found := fields.section(name))]
    rope = next((section for section in sections if _kind(section) != "default"), (*sections, fields)[0])
    theta = (rope if rope.has("rope_theta") else fields).number("rope_theta")
    holder = rope if rope.has("partial_rotary_factor") else fields
    fraction = holder.number("partial_rotary_factor", default_fraction)
    if not sections:
        return Rope(theta, fraction, default_scaling)
    scaling = _scaling(rope, fields)
    rope.refuse_unread()
    return Rope(theta, fraction, scaling)


def _scaling(rope: HfFields, fields: HfFields) -> RopeScaling | None:
    kind = _kind(rope)
    if kind == "default":
        # What a kind of scaling would read, left behind by tools that turned it off.
        rope.ignore("factor")
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope.number("factor"),
            low_frequency_factor=rope.number("low_freq_factor"),
            high_frequency_factor=rope.number("high_freq_factor"),
            original_max_positions=rope.integer("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(rope, fields)
    fields.require("rope_type", kind, ("default", "linear", "llama3", "yarn"))
    raise AssertionError(kind)


def _yarn(rope: HfFields, fields: HfFields) -> YarnScaling:
    original = rope.integer("original_max_position_embeddings")
    factor = rope.number("factor", fields.integer("max_position_embeddings") / original)
    mscale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    sharpening = yarn_mscale(factor, 1.0)
    if mscale and all_dim:
        sharpening = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", sharpening),
        softmax_mscale=all_dim,
        is_truncated=rope.boolean("truncate", True),
    )


def _kind(rope: HfFields) -> str:
    rope.ignore("rope_type", "type")
    return rope.string(rope.present("rope_type", "type"), "default")
