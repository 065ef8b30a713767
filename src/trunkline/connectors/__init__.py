"""Code that runs inside a real engine: its blocks go into our store, and are pulled from there.

`vllm.py` is what vLLM loads, and the only module that may import it; the rest needs neither vLLM
nor torch. Nobody imports this folder. Read `docs/connector.md`, then `plan.py`.
"""
