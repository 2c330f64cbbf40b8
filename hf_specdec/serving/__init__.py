"""A server for a handful of users: OpenAI's completions over the loop of many requests, with speculation.

transformers has a server, too. Its handlers decode every request of a model with one generation config, count no
drafts in `usage`, take whole generation configs from request bodies, the path of a draft model among them, and load
models that clients name. So this one stands on FastAPI alone.
"""
