"""The one matrix product that every layer calls, and the table look-up beside it.

What makes them fast is decided here, in one form for all backends; where backends want unlike forms,
backend.py chooses. docs/performance.md has the reasons.
"""

import jax
import jax.numpy as jnp


def _product(x_MxI: jax.Array, w_OxI: jax.Array) -> jax.Array:
    # Contracting the last axis of both sides keeps Hugging Face's [out, in] weights as they lie in memory.
    return jax.lax.dot_general(x_MxI, w_OxI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def _matmul(x_MxI: jax.Array, w_OxI: jax.Array) -> jax.Array:
    return _product(x_MxI, w_OxI)


def _matmul_fwd(x_MxI, w_OxI):
    return _product(x_MxI, w_OxI), (x_MxI, w_OxI)


def _matmul_bwd(saved, g_MxO):
    # The transpose of a bf16 dot with an fp32 result would contract fp32 with bf16, which is slow
    # everywhere; the cotangent is cast so that both backward products run in the weights' dtype.
    x_MxI, w_OxI = saved
    g = g_MxO.astype(w_OxI.dtype)
    dx = jax.lax.dot_general(g, w_OxI, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    dw = jax.lax.dot_general(g, x_MxI, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return dx.astype(x_MxI.dtype), dw.astype(w_OxI.dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def dot(x: jax.Array, w_OxI: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`x @ w.T`, accumulated in fp32.

    Args:
        x: [..., I]; cast to the weight's dtype.
        w_OxI: a weight in torch layout, [out, in].
        out_dtype: of the result; by default x's.
    Returns:
        [..., O].
    """
    # The left side is made two-dimensional: a batch axis makes XLA:CPU transpose the weight.
    flat = x.reshape(-1, x.shape[-1]).astype(w_OxI.dtype)
    y = _matmul(flat, w_OxI).astype(out_dtype or x.dtype)
    return y.reshape(*x.shape[:-1], w_OxI.shape[0])


def head_logits(hidden: jax.Array, head_VxD: jax.Array) -> jax.Array:
    """Logits [..., V] in fp32 of hidden states [..., D] through the output head."""
    return dot(hidden, head_VxD, jnp.float32)


def embed_rows(table_VxD: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows [..., D] of an embedding table for token ids [...]."""
    if table_VxD.dtype != jnp.bfloat16:
        return jnp.take(table_VxD, ids, axis=0)
    # XLA:CPU widens a bf16 gather's whole operand to fp32 and hoists the copy; bits need no arithmetic.
    bits = jnp.take(jax.lax.bitcast_convert_type(table_VxD, jnp.uint16), ids, axis=0)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
