"""Life of a model version: data lineage, approval, champion, retraining, dead runs."""
