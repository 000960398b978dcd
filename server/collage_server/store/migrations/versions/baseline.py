"""The first revision: an empty database gets it at once from the tables of the code, so nothing is done here.

Until a release has it, a change of the tables raises its number; afterwards it is a new module of this folder.
"""

revision = "r0011"
down_revision = None
