"""What is particular to a database below SQLAlchemy: driver statements, the pipeline, files and their space."""
