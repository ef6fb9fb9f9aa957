"""posttrain's learning: losses, rollouts, trainers. Imports torch and transformers, never Prefect or MLflow."""
