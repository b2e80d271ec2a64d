"""One step each; Prefect's @task is a thin shell round a plain function."""
