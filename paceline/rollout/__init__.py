"""Rollout engines: token ids of prompts in, sampled token ids and their log-probs out.

This layer knows neither Ray nor the training engines; `paceline.workers` joins them.
"""
