"""vllm-pacer: cap each user's generation speed inside vLLM's scheduler."""
