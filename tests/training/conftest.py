"""Training in these tests runs on the CPU, also where accelerate would find a GPU."""

import os


os.environ.setdefault("ACCELERATE_USE_CPU", "true")
