"""What gaugekit does, one file a verb; each returns a frozen report with `to_dict()`."""
