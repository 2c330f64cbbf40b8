"""Training of the models that `hf_specdec.demo` ships: `python -m tools.build_demo --output DIR`."""
