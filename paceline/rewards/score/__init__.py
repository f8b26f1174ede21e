"""Scorers that come with paceline."""
