"""Numerics as pure functions of tensors. docs/numerics.md has the equations and the papers."""
