"""dscout_jax: block-diffusion drafters for speculative decoding, trained and decoded in JAX."""

__version__ = "0.1.0"
