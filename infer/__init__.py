"""Inference programs: generate, benchmark, latency, report. They import no training code."""
