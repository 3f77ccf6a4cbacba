"""Metrics, calibration, and the baselines that a trained model is compared with."""
