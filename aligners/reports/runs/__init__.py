"""What a run has measured, as a report: a module or a folder for each kind, which `kinds.yaml` names."""
