"""Tests that run in an interpreter with vLLM; the environment that they need, before its import."""

import os

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels of the second model runner, on a CPU
