"""Probes across a map: does a probe that was trained on Y read g(X), and does Y use what the probe reads?"""
