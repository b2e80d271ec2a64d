"""The outside world: object store, MLflow, Prefect, settings and documents."""
