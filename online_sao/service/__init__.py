"""The service: vLLM behind Ray Serve, the judge's worker, the learner's actor, HTTP routes."""
