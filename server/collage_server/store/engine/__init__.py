"""The database-specific code below SQLAlchemy: driver statements, the pipeline, files and their space."""
