from dscout_jax.cli import main

main()
