"""From stored points to answers: pure functions, no database, no web."""
