"""The decoding loop and what it stands on: the target model, its slot cache, the returned output."""
