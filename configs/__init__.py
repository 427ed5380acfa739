"""Settings: schema, loading, live changes, logs. Imports no other package of the project."""
