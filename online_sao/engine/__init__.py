"""What the live service and the offline runner share of vLLM: weights in, settings."""
