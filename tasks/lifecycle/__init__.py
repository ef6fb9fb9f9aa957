"""Lifecycle of a model version: data lineage, promotion, approval, retraining; and detection of crashed runs."""

from __future__ import annotations
