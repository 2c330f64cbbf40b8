"""Recipes that train the small networks of speculative decoding for a target model."""
