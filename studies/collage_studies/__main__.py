"""`python -m collage_studies NAME`: run a study."""

from collage_studies.command import study

if __name__ == "__main__":
    study(prog_name="python -m collage_studies")
