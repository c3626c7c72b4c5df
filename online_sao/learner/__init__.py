"""The learner: policy, critic, one update per rewarded rollout, and the loop around it.

Knows nothing of vLLM, Ray or HTTP: `loop.py` takes a store and a publisher.
"""
