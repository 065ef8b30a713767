# What `trunkline.connectors.vllm` uses of vLLM 0.32, for type checking where vLLM is not installed.
# tests/vllm/test_connector_surface.py holds it against the real one.
__version__: str
